"""Measures step times of two servers, bare and with a drafter, and the tokens that drafts gain.

Both are real servers with the user's flags, loaded over HTTP; their schedulers record every step
(`step_records`). A round is one batch size and one K: all requests of a batch are sent at once, to
one server and to the other. K is constant within a round, because tokens per step depend on the
positions at which steps begin, and those depend on K. A round of the server with the drafter ends
when every request has its tokens.

How servers take turns is described in `server_turns`. In slices both servers answer a round at the
same time, a few steps of one and a few of the other, so that anything that slows the machine slows
both. Otherwise the steps of a round on one server are compared with those on the other.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self, TypeVar

from leadout.console import Progress
from leadout.engine.child_process import EngineError, Message
from leadout.engine.server_turns import Launch, RunningServer, Turns, started
from leadout.engine.step_records import (
    RecordedSteps,
    RoundTag,
    ServerFacts,
    StepRecord,
    round_option,
)

BARE, DRAFTING = "bare", "drafting"
# Timed steps per turn. The first step after a stop is not timed: it spans the stop.
BARE_STEPS, DRAFTING_STEPS = 3, 6
MAX_TOKENS = 16384  # of a request, which is aborted long before
STUCK_SECONDS = 600.0  # without a step
_POLL_SECONDS = 0.01

_Item = TypeVar("_Item")


class RoundRequest(Message):
    batch: int
    k: int
    prompts: list[int]  # indices, as many as `batch`


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    bare: Launch
    drafting: Launch
    records: dict[str, Path]  # by name of the server: the folder into which it records
    flags: Sequence[str]  # the user's for both servers
    turns: Turns
    prompts: Sequence[Sequence[int]]
    rounds: Sequence[RoundRequest]
    tokens: int  # every request generates so many in steps that verify K drafts
    max_length: int  # of a request, with its prompt


class StepTime(Message):
    verified: int  # drafts per request
    drafted: int  # per request
    seconds: float


class Turn(Message):
    """Steps of both servers that are compared with each other."""

    bare: list[float]  # seconds
    steps: list[StepTime]


class Gained(Message):
    """Tokens that one request gained in each step that verified K drafts."""

    prompt: int
    tokens: list[int]


class Prefill(Message):
    """A step that only processed prompts."""

    tokens: int
    seconds: float


class RoundResult(Message):
    batch: int
    k: int
    turns: list[Turn]
    gained: list[Gained]
    prefill_bare: list[Prefill]
    prefill_drafting: list[Prefill]


class CalibrationResult(Message):
    bare: ServerFacts
    drafting: ServerFacts
    turns: Turns
    rounds: list[RoundResult]


def calibrate(request: CalibrationRequest, logs: Path, progress: Progress) -> CalibrationResult:
    """Start the servers, and measure all rounds."""
    return asyncio.run(_Calibration(request, logs, progress).run())


class _Recording:
    """A server and what it records."""

    def __init__(self, name: str, server: RunningServer, folder: Path) -> None:
        self.has_drafter = name == DRAFTING
        self.server, self.steps = server, RecordedSteps(folder)
        self.facts = self.steps.facts()


class _Round:
    """One round on one server, while its requests run."""

    def __init__(
        self,
        recording: _Recording,
        request: CalibrationRequest,
        settings: RoundRequest,
        number: int,
        *,
        is_endless: bool = False,
    ) -> None:
        """`is_endless`: the round does not end when every request has its tokens."""
        self._server, self._steps = recording.server, recording.steps
        self._settings, self._number = settings, number
        self._k = settings.k if recording.has_drafter else 0
        # Without drafts all steps are alike and there is no acceptance to measure.
        enough = request.tokens if self._k else request.tokens // 2
        self._tokens = math.inf if is_endless else enough
        self._load = self._server.batch(list(map(self._body, *self._places(request))))
        self._gained: list[list[int]] = [[] for _ in settings.prompts]
        self.prefills: list[Prefill] = []

    def _places(self, request: CalibrationRequest) -> tuple[range, list[Sequence[int]], list[int]]:
        prompts = [request.prompts[number] for number in self._settings.prompts]
        lengths = [min(MAX_TOKENS, request.max_length - len(prompt)) for prompt in prompts]
        return range(len(prompts)), prompts, lengths

    def _body(self, place: int, prompt: Sequence[int], max_tokens: int) -> dict[str, object]:
        return {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "vllm_xargs": round_option(RoundTag(self._number, place, self._k)),
            # Every round reads its prompts anew, also with prefix caching.
            "cache_salt": f"{self._number}-{place}",
        }

    async def __aenter__(self) -> Self:
        self._steps.clear()
        await self._load.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._load.__aexit__()

    async def timed_steps(self, count: int | None = None) -> list[StepTime]:
        """The next steps of the whole batch: at least `count` of them, or until the round ends."""
        found: list[StepTime] = []
        last = time.monotonic()
        while not self.is_over and (count is None or len(found) < count):
            await asyncio.sleep(_POLL_SECONDS)
            records = self._steps.new()
            found += [step for record in records for step in self._counted(record)]
            last = time.monotonic() if records else last
            if time.monotonic() - last > STUCK_SECONDS:
                raise EngineError(
                    f"{self._server.label}: no step in {STUCK_SECONDS:.0f} s at batch size "
                    f"{self._settings.batch}. See the server's log, or lower --max-batch."
                )
        return found

    async def prefill(self) -> None:
        """From stopped to stopped: until the whole batch decodes. What it gains does not count."""
        await self.slice(1)
        for gained in self._gained:
            gained.clear()

    async def slice(self, count: int) -> list[StepTime]:
        """As `timed_steps`, from stopped to stopped."""
        self._server.resume()
        try:
            return await self.timed_steps(count)
        finally:
            self._server.pause()

    @property
    def is_over(self) -> bool:
        """Every request has its tokens, or one has reached the maximum length."""
        if self._load.has_ended:
            return True
        return all(sum(tokens) >= self._tokens for tokens in self._gained)

    def gained(self) -> list[Gained]:
        pairs = zip(self._settings.prompts, self._gained, strict=True)
        return [Gained(prompt=prompt, tokens=tokens) for prompt, tokens in pairs]

    def _counted(self, record: StepRecord) -> list[StepTime]:
        """The time of a step, if it is one of the whole batch without any prefill."""
        if record.round != self._number:
            return []
        if not record.decoded:
            if record.seconds is not None:
                prefill = Prefill(tokens=record.prompt_tokens, seconds=record.seconds)
                self.prefills.append(prefill)
            return []
        for place, verified, tokens in record.decoded:
            gained = self._gained[place]
            if verified == self._k and sum(gained) < self._tokens:
                gained.append(tokens)
        lengths = {verified for _, verified, _ in record.decoded}
        is_whole = len(record.decoded) == self._settings.batch and len(lengths) == 1
        if record.prompt_tokens or not is_whole or record.seconds is None:
            return []
        return [StepTime(verified=lengths.pop(), drafted=record.drafted, seconds=record.seconds)]


@dataclass(frozen=True, slots=True)
class _Alone:
    """What a server did in a round that it had to itself."""

    steps: list[StepTime]
    gained: list[Gained]
    prefills: list[Prefill]


class _Calibration:
    def __init__(self, request: CalibrationRequest, logs: Path, progress: Progress) -> None:
        self._request, self._logs, self._progress = request, logs, progress
        self._order = random.Random(0)

    async def run(self) -> CalibrationResult:
        request = self._request
        facts: dict[str, ServerFacts] = {}
        if request.turns == "single":
            alone: dict[str, list[_Alone]] = {}
            for launch in (request.bare, request.drafting):
                async with AsyncExitStack() as stack:
                    (recording,) = await self._started(stack, [launch], facts)
                    advance = self._progress.stage(f"measure {launch.name}", len(request.rounds))
                    alone[launch.name] = []
                    for number, each in enumerate(request.rounds):
                        alone[launch.name].append(await self._alone(recording, each, number))
                        advance(note=_described(each))
            pairs = zip(request.rounds, alone[BARE], alone[DRAFTING], strict=True)
            return self._result(facts, [joined(*pair) for pair in pairs])
        async with AsyncExitStack() as stack:
            launches = [request.bare, request.drafting]
            bare, drafting = await self._started(stack, launches, facts)
            measure = self._in_slices if request.turns == "slices" else self._in_waves
            advance = self._progress.stage("measure", len(request.rounds))
            rounds = []
            for number, each in enumerate(request.rounds):
                rounds.append(await measure(bare, drafting, each, number))
                advance(note=_described(each))
        return self._result(facts, rounds)

    def _result(
        self, facts: dict[str, ServerFacts], rounds: list[RoundResult]
    ) -> CalibrationResult:
        return CalibrationResult(
            bare=facts[BARE], drafting=facts[DRAFTING], turns=self._request.turns, rounds=rounds
        )

    async def _started(
        self, stack: AsyncExitStack, launches: Sequence[Launch], facts: dict[str, ServerFacts]
    ) -> list[_Recording]:
        """Servers that have answered the largest round once: their first steps take seconds."""
        request = self._request
        running = started(launches, request.flags, self._logs, self._progress)
        servers = await stack.enter_async_context(running)
        largest = max(request.rounds, key=lambda each: (each.batch, each.k))
        found = []
        for name, server in servers.items():
            recording = _Recording(name, server, request.records[name])
            facts[name] = recording.facts
            server.resume()
            async with _Round(recording, request, largest, len(request.rounds)) as warm_up:
                await warm_up.timed_steps(DRAFTING_STEPS)
            found.append(recording)
        return found

    async def _in_slices(
        self, bare: _Recording, drafting: _Recording, settings: RoundRequest, number: int
    ) -> RoundResult:
        without = _Round(bare, self._request, settings, number, is_endless=True)
        with_drafts = _Round(drafting, self._request, settings, number)
        turns = []
        async with AsyncExitStack() as stack:
            for each in (bare, drafting):
                each.server.pause()
                stack.callback(each.server.resume)  # after its requests are aborted
            for one in (without, with_drafts):
                await stack.enter_async_context(one)
                await one.prefill()
            while not (with_drafts.is_over or without.is_over):
                bare_steps = await without.slice(BARE_STEPS)
                steps = await with_drafts.slice(DRAFTING_STEPS)
                turns.append(Turn(bare=[step.seconds for step in bare_steps], steps=steps))
        return RoundResult(
            batch=settings.batch,
            k=settings.k,
            turns=turns,
            gained=with_drafts.gained(),
            prefill_bare=without.prefills,
            prefill_drafting=with_drafts.prefills,
        )

    async def _in_waves(
        self, bare: _Recording, drafting: _Recording, settings: RoundRequest, number: int
    ) -> RoundResult:
        found = {}
        for each in self._order.sample((bare, drafting), 2):
            found[each is bare] = await self._alone(each, settings, number)
        return joined(settings, found[True], found[False])

    async def _alone(self, recording: _Recording, settings: RoundRequest, number: int) -> _Alone:
        async with _Round(recording, self._request, settings, number) as one:
            steps = await one.timed_steps()
        return _Alone(steps, one.gained(), one.prefills)


def joined(settings: RoundRequest, bare: _Alone, drafting: _Alone) -> RoundResult:
    """A round that one server had after the other, as turns of a few steps."""
    count = max(1, len(drafting.steps) // DRAFTING_STEPS)
    parts = zip(_split(bare.steps, count), _split(drafting.steps, count), strict=True)
    return RoundResult(
        batch=settings.batch,
        k=settings.k,
        turns=[Turn(bare=[step.seconds for step in some], steps=others) for some, others in parts],
        gained=drafting.gained,
        prefill_bare=bare.prefills,
        prefill_drafting=drafting.prefills,
    )


def _split(items: Sequence[_Item], count: int) -> list[list[_Item]]:
    """So many parts in their order, as equal as possible."""
    ends = [len(items) * number // count for number in range(count + 1)]
    return [list(items[first:last]) for first, last in pairwise(ends)]


def _described(settings: RoundRequest) -> str:
    return f"batch size {settings.batch}, K = {settings.k}"
