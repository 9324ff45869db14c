"""A request's own word on drafts: `vllm_xargs: {"leadout_draft": "off"}`, or a number at most."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from leadout.control.acceptance_model import Outcome
from leadout.control.policy import Decision, Policy, Seat
from leadout.control.prompt_lookup import CopyIndex
from leadout.engine.small_files import read_small, small_file, write_small
from leadout.errors import LeadoutError

NAME = "leadout_draft"
OFF = "off"


class BadSteeringError(LeadoutError):
    """A value that says neither off nor a number of drafts."""


def draft_cap(arguments: Mapping[str, Any] | None, most: int) -> int:
    """The most drafts that a request wants verified in a step; `most` if it says nothing."""
    asked = (arguments or {}).get(NAME)
    if asked is None:
        return most
    if asked == OFF:
        return 0
    # Over HTTP a number may arrive as text; True is no number.
    if isinstance(asked, int) and not isinstance(asked, bool):
        number = asked
    elif isinstance(asked, str) and asked.isascii() and asked.isdigit():
        number = int(asked)
    else:
        number = -1
    if number < 0:
        raise BadSteeringError(
            f"{NAME} in vllm_xargs: found {asked!r}, wanted {OFF!r} or a whole number from 0 to "
            f"{most}; the request is served as if it said nothing"
        )
    return min(number, most)


# What live control did over the last minute, and the small file that carries it to `/metrics`.

WINDOW_SECONDS = 60


class LiveNumbers(BaseModel):
    """Sums over the steps of the last minute; `gain` is the last estimate."""

    model_config = ConfigDict(extra="forbid")

    written: float  # seconds of the epoch
    steps: int = 0
    drafted: int = 0  # K of each step, summed
    made: int = 0  # drafts that could have been verified
    verified: int = 0
    copied: int = 0  # of the verified ones, those copied from the request's own text
    accepted: int = 0
    probes: int = 0
    gain: float | None = None

    @property
    def draft_length(self) -> float:
        """Drafted per request and step."""
        return self.drafted / self.steps if self.steps else 0.0

    @property
    def skipped_share(self) -> float:
        """Of the drafts that were made, those that were not worth verifying."""
        return 1 - min(1.0, (self.verified - self.copied) / self.made) if self.made else 0.0

    @property
    def copied_share(self) -> float:
        return self.copied / self.verified if self.verified else 0.0


class NumbersWindow:
    """Sums second by second; those older than a minute are forgotten."""

    def __init__(self) -> None:
        self._seconds: deque[LiveNumbers] = deque()

    def add(self, step: LiveNumbers) -> None:
        second = int(step.written)
        if not self._seconds or int(self._seconds[-1].written) < second:
            self._seconds.append(LiveNumbers(written=second))
        last = self._seconds[-1]
        for name in _SUMMED:
            setattr(last, name, getattr(last, name) + getattr(step, name))
        last.gain = step.gain

    def total(self, now: float) -> LiveNumbers:
        while self._seconds and self._seconds[0].written <= now - WINDOW_SECONDS:
            self._seconds.popleft()
        total = LiveNumbers(written=now)
        for second in self._seconds:
            for name in _SUMMED:
                setattr(total, name, getattr(total, name) + getattr(second, name))
            total.gain = second.gain
        return total


_SUMMED = ("steps", "drafted", "made", "verified", "copied", "accepted", "probes")


def numbers_file(instance: str, engine: int) -> Path:
    return small_file("live", instance, engine)


def write_numbers(numbers: LiveNumbers, path: Path) -> None:
    write_small(numbers, path)


def read_numbers(path: Path) -> LiveNumbers | None:
    """None without a file, or with one that tells of nothing within the last minute."""
    numbers = read_small(path, LiveNumbers)
    if numbers is None or time.time() - numbers.written >= WINDOW_SECONDS:
        return None
    return numbers


# Live control between vLLM's scheduler and the policy: who is there, what was done, what came.
#
# Knows vLLM's requests only by their fields, and no vLLM module. The scheduler asks before a
# step and
# tells after it; everything here may fail without harm, see `scheduler`.

WRITE_SECONDS = 1.0
LOG_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is on its way."""

    requests: tuple[str, ...]
    decision: Decision
    made: int  # drafts of the drafter that could be verified
    started: float


@dataclass(frozen=True, slots=True)
class Drafts:
    """What one request verifies: the first of the drafter's drafts, or copied ones."""

    tokens: list[int]
    are_copied: bool


class LiveControl:
    """One engine's policy, its requests' copy indexes, and what is told about them."""

    def __init__(
        self,
        policy: Policy,
        most: int,
        numbers: Path,
        log: Callable[[str], None],
        copy_match: int = 0,
    ) -> None:
        self._policy = policy
        self._most = most
        self._numbers = numbers
        self._log = log
        self._copy_match = copy_match
        self._indexes: dict[str, CopyIndex] = {}
        self._caps: dict[str, int] = {}
        self._window = NumbersWindow()
        self._written = 0.0
        self._logged = time.monotonic()
        self._ended = 0.0  # when the last step's output arrived
        self._has_told_bad_steering = False

    def plan(self, requests: Sequence[Any]) -> tuple[Step, list[Drafts]]:
        """The coming step of the requests that decode, and what each of them verifies in it."""
        seats, copies = [], []
        for request in requests:
            cap = self._cap(request)
            copied = self._copied(request) if cap else []
            copies.append(copied)
            seats.append(Seat(request.request_id, len(request.spec_token_ids), cap, len(copied)))
        decision = self._policy.decide(seats)
        chosen = []
        for request, count, copied, is_copy in zip(
            requests, decision.verify, copies, decision.copies, strict=True
        ):
            drafts = copied if is_copy else request.spec_token_ids
            chosen.append(Drafts(list(drafts[:count]), is_copy))
        step = Step(
            requests=tuple(seat.request for seat in seats),
            decision=decision,
            made=sum(seat.available for seat in seats),
            started=time.perf_counter(),
        )
        return step, chosen

    def done(
        self, step: Step, verified: Mapping[str, int], sampled: Mapping[str, int], *, is_pure: bool
    ) -> None:
        """What came of a step: by request, drafts that the engine really verified and new tokens.

        `is_pure`: it did nothing but decode, so that its time tells what decoding costs.
        """
        ended = time.perf_counter()
        # With several steps on their way, one begins to count when the one before it is over.
        seconds = ended - max(step.started, self._ended)
        self._ended = ended
        decision, outcomes = step.decision, []
        for request, planned, is_copy in zip(
            step.requests, decision.verify, decision.copies, strict=True
        ):
            gained = sampled.get(request, 0)
            if not gained:
                is_pure = False  # gone, or its output was dropped
                continue
            tried = min(verified.get(request, 0), planned)
            outcomes.append(Outcome(request, tried, min(gained - 1, tried), copied=is_copy))
        self._policy.observe(outcomes, decision.draft, seconds if is_pure else None)
        self._tell(step, outcomes)

    def forget(self, request: str) -> None:
        self._policy.forget(request)
        self._indexes.pop(request, None)
        self._caps.pop(request, None)

    def close(self) -> None:
        self._numbers.unlink(missing_ok=True)

    def _cap(self, request: Any) -> int:
        known = self._caps.get(request.request_id)
        if known is not None:
            return known
        parameters = request.sampling_params
        try:
            cap = draft_cap(None if parameters is None else parameters.extra_args, self._most)
        except BadSteeringError as problem:
            cap = self._most
            if not self._has_told_bad_steering:
                self._has_told_bad_steering = True
                self._log(f"{problem}. Further such values are ignored without a word.")
        self._caps[request.request_id] = cap
        return cap

    def _copied(self, request: Any) -> list[int]:
        if not self._copy_match:
            return []
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = CopyIndex(self._copy_match)
        return index.continuation(request.all_token_ids, self._most)

    def _tell(self, step: Step, outcomes: Sequence[Outcome]) -> None:
        now = time.time()
        decision = step.decision
        self._window.add(
            LiveNumbers(
                written=now,
                steps=1,
                drafted=decision.draft,
                made=step.made,
                verified=sum(outcome.verified for outcome in outcomes),
                copied=sum(outcome.verified for outcome in outcomes if outcome.copied),
                accepted=sum(outcome.accepted for outcome in outcomes),
                probes=int(decision.is_probe),
                gain=decision.gain,
            )
        )
        if now - self._written >= WRITE_SECONDS:
            self._written = now
            write_numbers(self._window.total(now), self._numbers)
        if time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            self._log(_in_words(self._window.total(now)))


def _in_words(numbers: LiveNumbers) -> str:
    gain = "unknown" if numbers.gain is None else f"{numbers.gain:.2f} times a bare engine"
    return (
        f"Live control over the last minute: {numbers.steps} steps, K {numbers.draft_length:.1f} "
        f"on average, {numbers.accepted} of {numbers.verified} verified drafts accepted, "
        f"{100 * numbers.skipped_share:.0f}% of the drafts made not verified, "
        f"{100 * numbers.copied_share:.0f}% of the verified ones copied, {numbers.probes} probes, "
        f"estimated speed {gain}."
    )
