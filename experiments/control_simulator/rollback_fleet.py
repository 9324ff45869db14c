"""Servers that compare a new drafter version, with hostile requests among ordinary ones.

The product's own code decides: its limits for prompts and clients, its tallies, its test, and its
rule that two servers must agree. Simulated are requests, the time of a swap, and restarts.

An ordinary request is one that was measured (tokens and steps of a real answer with a real
drafter), drawn at random. Another version accepts more or less on every request by the same factor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from leadout.control.rollback import (
    BINS_PER_TOKEN,
    FIRST_CHECK,
    HOSTILE_BURST,
    HOSTILE_LENGTH,
    MAX_BIN,
    MAX_CHECKS,
    MAX_STEPS,
    Acceptance,
    Expectation,
    RequestLimits,
    ShortfallTest,
    Sums,
    Tally,
)
from leadout.stats import Floats

HELD_OUT = 200  # requests on which the expectation is measured
BEFORE = 500  # requests of the version before on each server, until the swap
GAIN = 0.05  # of a new version over the one before
CLIENTS = 50  # ordinary ones; a few of them send most requests
HOSTILE_TOKENS = 512
LAST_CHECK = FIRST_CHECK * 2 ** (MAX_CHECKS - 1)
LOST_AT_RESTART = 60  # requests at most, since the last record
MIN_STEPS = 10  # a shorter answer has hardly any acceptance length


@dataclass(frozen=True)
class Population:
    """Ordinary requests: tokens of each answer and its acceptance length with a good version."""

    tokens: Floats  # [requests]
    lengths: Floats  # [requests]

    @classmethod
    def read(cls, rows: list[dict[str, Any]]) -> Population:
        steps = np.array([row["steps"][0] for row in rows], dtype=np.float64)
        tokens = np.array([row["accepted"][0] for row in rows], dtype=np.float64) + steps
        usable = steps >= MIN_STEPS
        return cls(tokens[usable], (tokens / steps)[usable])

    @property
    def spread(self) -> float:
        """Standard deviation of the acceptance length of requests, relative to its mean."""
        return float(self.lengths.std() / self.lengths.mean())

    @property
    def length(self) -> float:
        """The acceptance length as servers count it."""
        steps = np.minimum(self.tokens / self.lengths, MAX_STEPS)
        return float((steps * self.lengths).sum() / steps.sum())

    def at(self, length: float) -> Population:
        """The same requests with a version of another acceptance length."""
        low, high = 0.0, 4.0
        for _ in range(40):
            factor = (low + high) / 2
            if self._scaled(factor).length > length:
                high = factor
            else:
                low = factor
        return self._scaled(high)

    def drawn(self, count: int, draw: np.random.Generator) -> tuple[Floats, Floats]:
        """Steps and tokens of so many requests."""
        places = draw.integers(len(self.tokens), size=count)
        tokens = self.tokens[places]
        return np.maximum(np.round(tokens / self.lengths[places]), 1), tokens

    def _scaled(self, factor: float) -> Population:
        return Population(self.tokens, 1 + factor * (self.lengths - 1))


@dataclass(frozen=True)
class Hostile:
    """What hostile clients do."""

    share: float = 0.1  # of the requests
    length: Literal["lowest", "just kept", "highest"] = "lowest"
    in_bursts: bool = False  # as many as are tolerated in a row, the first right after the swap
    clients: Literal["many", "one", "known"] = "many"  # "known": behind the ordinary ones' address
    one_prompt: bool = False
    before: bool = True  # also on the version before
    now: bool = True  # on the new version


@dataclass(frozen=True)
class Scene:
    """What is simulated; `below` is the share by which the version is below its promise."""

    below: float = 0.0
    hostile: Hostile = field(default_factory=Hostile)
    servers: int = 1
    # Share by which all acceptance has fallen: since the traffic was captured, or since the swap.
    harder_since_capture: float = 0.0
    harder_since_swap: float = 0.0


def tally_of(steps: Floats, tokens: Floats) -> Tally:
    """The sums that `Tally.with_request` makes of so many requests, one after the other."""
    counted = np.minimum(steps, MAX_STEPS)
    scaled = tokens * counted / steps
    places = np.minimum((BINS_PER_TOKEN * tokens / steps).astype(int), MAX_BIN)
    used, index = np.unique(places, return_inverse=True)
    columns = [
        np.bincount(index, weights)
        for weights in (
            np.ones(len(steps)),
            counted,
            scaled,
            counted * counted,
            scaled * scaled,
            counted * scaled,
        )
    ]
    rows = np.array(columns).T.tolist()
    bins = {place: Sums(*row) for place, row in zip(used.tolist(), rows, strict=True)}
    return Tally.model_construct(
        requests=len(steps), steps=int(steps.sum()), tokens=int(tokens.sum()), bins=bins
    )


class Server:
    """The requests of one server after the swap, and how it compares them."""

    def __init__(
        self,
        expected: Expectation,
        served: Population,
        before: Population,
        scene: Scene,
        draw: np.random.Generator,
    ) -> None:
        self.speed = draw.uniform(0.5, 1.5)  # requests per unit of time
        self.left_at: float | None = None
        self._before, self._scene, self._expected, self._draw = before, scene, expected, draw
        hostile = scene.hostile
        old = before.at(before.length / (1 - scene.harder_since_swap))
        self._test = ShortfallTest(
            expected, tally_of(*self._requests(old, BEFORE, hostile.before)[:2])
        )
        most = int(LAST_CHECK / (1 - hostile.share) * 1.1) + LOST_AT_RESTART
        self._steps, self._tokens, self._is_hostile = self._requests(served, most, hostile.now)
        self._clients = np.minimum(draw.zipf(1.3, most), CLIENTS)
        self._restart = int(draw.integers(LAST_CHECK))
        self._lost_since = self._restart - int(draw.integers(LOST_AT_RESTART))
        self._limits = RequestLimits()
        self._place = 0  # of the next request
        self._tally = self._by_client = Tally()
        self._due = self._serve_until_check()

    def next_check(self) -> float | None:
        """Its time; None after the last one."""
        return None if self.left_at is not None else self._due

    def check(self, control: Tally) -> bool:
        """Whether the version falls short; to be called at the time of the next check."""
        found = self._test.check(self._tally, self._by_client, control)
        self._due = None if self._test.is_finished else self._serve_until_check()
        return found is not None

    @property
    def control_from(self) -> float:
        """When there are enough requests of the version before to compare others with."""
        assert self.left_at is not None
        return self.left_at + (FIRST_CHECK + 1) / self.speed

    def control(self, now: float) -> Tally:
        """Requests of the version before since this server has returned to it."""
        if self.left_at is None:
            return Tally()
        count = min(int((now - self.left_at) * self.speed), LAST_CHECK)
        return tally_of(*self._requests(self._before, count, self._scene.hostile.before)[:2])

    def _serve_until_check(self) -> float | None:
        """Count requests until the next check is due, and return its time."""
        wanted = FIRST_CHECK * 2**self._test.checks
        counted: list[int] = []
        by_client: list[int] = []
        while self._tally.requests + len(counted) < wanted:
            place = self._place
            if place == len(self._steps):
                return None
            if place == self._restart:
                self._add(counted, by_client)
                self._restart_from_record()
                counted, by_client = [], []
            counts, counts_by_client = self._admit(place)
            if not self._lost_since <= place < self._restart:
                if counts:
                    counted.append(place)
                if counts_by_client:
                    by_client.append(place)
            self._place += 1
        self._add(counted, by_client)
        return self._place / self.speed

    def _admit(self, place: int) -> tuple[bool, bool]:
        prompt, client = place, int(self._clients[place])
        if self._is_hostile[place]:
            hostile = self._scene.hostile
            prompt = -1 if hostile.one_prompt else place
            client = {"many": -place - 2, "one": -1, "known": client}[hostile.clients]
        return self._limits.admit(prompt, client)

    def _add(self, counted: list[int], by_client: list[int]) -> None:
        self._tally += tally_of(self._steps[counted], self._tokens[counted])
        self._by_client += tally_of(self._steps[by_client], self._tokens[by_client])

    def _restart_from_record(self) -> None:
        self._limits = RequestLimits()
        self._tally = Tally.model_validate_json(self._tally.model_dump_json())
        self._by_client = Tally.model_validate_json(self._by_client.model_dump_json())
        self._test = ShortfallTest(self._expected, self._test.before, self._test.checks)

    def _requests(
        self, served: Population, count: int, with_hostile: bool
    ) -> tuple[Floats, Floats, Any]:
        """Steps and tokens of requests, and whether each is hostile."""
        hostile, draw = self._scene.hostile, self._draw
        steps, tokens = served.drawn(count, draw)
        is_hostile = draw.random(count) < hostile.share
        if hostile.in_bursts:
            is_hostile = np.arange(count) % int(HOSTILE_BURST / hostile.share) < HOSTILE_BURST
        is_hostile &= with_hostile
        low = self._expected.version.low * HOSTILE_LENGTH
        just_kept = max(np.ceil(low * BINS_PER_TOKEN) / BINS_PER_TOKEN, 1.0)
        length = {"lowest": 1.0, "just kept": just_kept, "highest": 8.0}[hostile.length]
        tokens = np.where(is_hostile, HOSTILE_TOKENS, tokens)
        steps = np.where(is_hostile, np.floor(HOSTILE_TOKENS / length), steps)
        return steps, tokens, is_hostile


def is_removed(population: Population, scene: Scene, draw: np.random.Generator) -> bool:
    """Whether the servers of a registry mark a version as bad."""
    old = population.at(population.length / (1 + GAIN))
    places = draw.integers(len(population.tokens), size=HELD_OUT)  # the same for both versions
    after, before = (
        Acceptance.of(tally_of(each.tokens[places] / each.lengths[places], each.tokens[places]))
        for each in (population, old)
    )
    assert after is not None
    harder = (1 - scene.harder_since_capture) * (1 - scene.harder_since_swap)
    length = population.length
    if scene.below:  # of a promise that this traffic can keep
        length = (1 - scene.below) * min(after.low, length)
    served, old = population.at(length * harder), population.at(old.length * harder)
    servers = [
        Server(Expectation(after, before), served, old, scene, draw) for _ in range(scene.servers)
    ]
    failed = 0
    while True:
        due = [(at, each) for each in servers if (at := each.next_check()) is not None]
        if not due:
            return False
        now, server = min(due, key=lambda pair: pair[0])
        # A server waits for the control if another one has just left the version.
        left = [each.control_from for each in servers if each.left_at is not None]
        now = max(now, *left) if left else now
        control = sum((each.control(now) for each in servers if each is not server), Tally())
        if server.check(control):
            server.left_at = now
            failed += 1
            if failed == min(2, scene.servers):
                return True
