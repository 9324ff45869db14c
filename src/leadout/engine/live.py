"""Live control between vLLM's scheduler and the policy: who is there, what was done, what came.

Knows vLLM's requests only by their fields, and no vLLM module. The scheduler asks before a step and
tells after it; everything here may fail without harm, see `scheduler`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leadout.control.copying import CopyIndex
from leadout.control.estimate import Outcome
from leadout.control.policy import Decision, Policy, Seat
from leadout.engine.live_numbers import LiveNumbers, NumbersWindow, write_numbers
from leadout.engine.steering import BadSteeringError, draft_cap

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
