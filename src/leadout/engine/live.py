"""Live control: connects vLLM's scheduler with the draft-length policy, without importing vLLM.

The scheduler calls `LiveControl.plan` before a step and `LiveControl.step_done` after it; vLLM's
requests are known by their attributes only. What live control did over the last minute goes to the
log and, through a small file, to `/metrics` in the API process. Requests can limit their own drafts
(`draft_limit`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict

from leadout.control.acceptance_model import Ints, Outcomes
from leadout.control.policy import Batch, Decision, Policy
from leadout.control.prompt_lookup import PromptLookup
from leadout.engine.counters import (
    WINDOW_SECONDS,
    SlidingWindow,
    disk_errors_logged,
    read_small,
    remove_small,
    small_file,
    write_small,
)
from leadout.engine.step_clock import Moment, StepClock

DRAFT_OPTION = "leadout_draft"  # in a request's `vllm_xargs`
OFF = "off"
WRITE_SECONDS = 1.0
LOG_SECONDS = 60.0


def draft_limit(options: Mapping[str, Any] | None, max_drafts: int) -> int:
    """A request's own limit on its drafts, from `vllm_xargs: {"leadout_draft": 2}` or "off".

    `max_drafts` without the option; ValueError for any other value.
    """
    value = (options or {}).get(DRAFT_OPTION)
    if value is None:
        return max_drafts
    if value == OFF:
        return 0
    # Over HTTP a number may arrive as text; bool is a subclass of int.
    if isinstance(value, int) and not isinstance(value, bool):
        limit = value
    elif isinstance(value, str) and value.isascii() and value.isdigit():
        limit = int(value)
    else:
        limit = -1
    if limit < 0:
        raise ValueError(
            f"{DRAFT_OPTION} in vllm_xargs is {value!r}, expected {OFF!r} or an integer from 0 to "
            f"{max_drafts}; the request is served with the default"
        )
    return min(limit, max_drafts)


class LiveMetrics(BaseModel):
    """Sums over the steps of the last minute; `gain` is the last estimate."""

    model_config = ConfigDict(extra="forbid")

    written: float  # seconds since the epoch
    steps: int = 0
    drafted: int = 0  # sum of each step's K
    available: int = 0  # drafts of the drafter that could have been verified
    verified: int = 0
    lookup: int = 0  # of the verified ones, those from prompt lookup
    accepted: int = 0
    probes: int = 0
    gain: float | None = None

    @property
    def draft_length(self) -> float:
        """Tokens drafted per request and step."""
        return self.drafted / self.steps if self.steps else 0.0

    @property
    def skipped_share(self) -> float:
        """Share of the drafter's drafts that were not worth verifying."""
        if not self.available:
            return 0.0
        return 1 - min(1.0, (self.verified - self.lookup) / self.available)

    @property
    def lookup_share(self) -> float:
        return self.lookup / self.verified if self.verified else 0.0

    def __str__(self) -> str:
        gain = "unknown" if self.gain is None else f"{self.gain:.2f} times that without drafts"
        return (
            f"Live control over the last minute: {self.steps} steps, mean K "
            f"{self.draft_length:.1f}, {self.accepted} of {self.verified} verified drafts "
            f"accepted, {100 * self.skipped_share:.0f}% of the drafter's drafts not verified, "
            f"{100 * self.lookup_share:.0f}% of the verified ones from prompt lookup, "
            f"{self.probes} probes, estimated speed {gain}."
        )


def live_metrics_file(instance: str, engine: int) -> Path:
    return small_file("live", instance, engine)


def read_live_metrics(path: Path) -> LiveMetrics | None:
    """None without a file, or with one that was not updated within the last minute."""
    metrics = read_small(path, LiveMetrics)
    if metrics is None or time.time() - metrics.written >= WINDOW_SECONDS:
        return None
    return metrics


@dataclass(frozen=True, slots=True)
class Step:
    """A step in flight."""

    request_ids: Sequence[str]
    decision: Decision
    available: int  # drafts of the drafter that could be verified
    scheduled: Moment


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the engine did in a step, by request.

    `scheduled` holds the tokens of all requests, `verified` the drafts among them, `sampled` the
    new tokens; `drafted` is the K of the step.
    """

    scheduled: Mapping[str, int]
    verified: Mapping[str, int]
    sampled: Mapping[str, int]
    drafted: int


# Other drafts for a request, the first of the drafter's or those of prompt lookup: the request, the
# tokens, and whether they come from prompt lookup. A plain tuple, as a step may have hundreds.
Drafts: TypeAlias = tuple[Any, list[int], bool]


def _array(counts: Sequence[int]) -> Ints:
    """Numbers of a request's tokens in a step; through bytes, five times as fast as directly."""
    try:
        return np.frombuffer(bytes(counts), np.uint8).astype(np.int64)
    except ValueError:  # above 255
        return np.array(counts, np.int64)


class LiveControl:
    """One engine's policy, with its requests' limits and lookup indexes, and its metrics."""

    def __init__(
        self,
        policy: Policy,
        max_drafts: int,
        metrics_path: Path,
        log: Callable[[str], None],
        min_match: int = 0,
    ) -> None:
        """`min_match` is that of prompt lookup; 0 switches it off."""
        self._policy, self._max_drafts, self._min_match = policy, max_drafts, min_match
        self._metrics_path, self._log = metrics_path, log
        self._lookups: dict[str, PromptLookup] = {}
        self._seen: set[str] = set()
        self._limits: dict[str, int] = {}  # of those that have one
        self._last_ids: Sequence[str] = ()
        self._window: SlidingWindow[str] = SlidingWindow()
        self._sums: Counter[str] = Counter()  # of steps since the last write
        self._written = float("-inf")
        self._logged = time.monotonic()
        self._clock = StepClock()
        self._has_logged_bad_option = False

    def plan(self, requests: Sequence[Any]) -> tuple[Step, list[Drafts]]:
        """The next step of the decoding requests, and those whose drafts change for it."""
        request_ids = [request.request_id for request in requests]
        limits = self._limits_of(requests, request_ids)
        available = list(map(len, [request.spec_token_ids for request in requests]))
        proposals = self._look_up(requests, limits)
        decision = self._policy.decide(
            Batch(
                request_ids,
                _array(available),
                limits,
                None if proposals is None else _array([len(each) for each in proposals]),
            )
        )
        changed: list[Drafts] = []
        if decision.verify != tuple(available):  # in most steps, a request verifies all that it has
            changed = [
                (request, request.spec_token_ids[:count], False)
                for request, count, before in zip(requests, decision.verify, available, strict=True)
                if count < before
            ]
        if proposals is not None:
            lookups = [
                (request, tokens[:count], True)
                for request, tokens, count, is_used in zip(
                    requests, proposals, decision.verify, decision.use_lookup, strict=True
                )
                if is_used
            ]
            replaced = {id(request) for request, _, _ in lookups}
            changed = [each for each in changed if id(each[0]) not in replaced] + lookups
        return Step(request_ids, decision, sum(available), self._clock.start()), changed

    def step_done(self, step: Step, report: StepReport) -> None:
        """Learn from a step."""
        seconds = self._clock.end(step.scheduled)
        decision, request_ids = step.decision, step.request_ids
        scheduled, verified, sampled = report.scheduled, report.verified, report.sampled
        use_lookup, planned = decision.use_lookup, decision.verify
        if list(scheduled) != request_ids and not all(map(scheduled.__contains__, request_ids)):
            # With pipeline parallelism, or too few batched tokens, some requests wait.
            kept = [index for index, each in enumerate(request_ids) if each in scheduled]
            request_ids = [request_ids[index] for index in kept]
            planned = tuple(planned[index] for index in kept)
            use_lookup = tuple(use_lookup[index] for index in kept)
        tokens = _array(list(map(sampled.get, request_ids, repeat(0))))
        if list(verified) == request_ids:  # as in most steps
            counts = _array(list(verified.values()))
        else:
            counts = _array(list(map(verified.get, request_ids, repeat(0))))
        prefill = sum(scheduled.values()) - len(request_ids) - int(counts.sum())
        counts = np.minimum(counts, _array(planned))
        if not tokens.all():  # aborted, or its output was dropped: nothing was learnt from it
            counts = np.where(tokens, counts, 0)
        accepted: Ints = np.minimum(np.maximum(tokens - 1, 0), counts)
        outcomes = Outcomes(
            request_ids, counts, accepted, np.array(use_lookup) if any(use_lookup) else None
        )
        self._policy.observe(
            outcomes, report.drafted, seconds, max(0, prefill), explores=decision.explores
        )
        self._record(step, report.drafted, outcomes)

    def forget(self, request_id: str) -> None:
        """Drop what is known about a request that has ended."""
        self._policy.forget(request_id)
        self._lookups.pop(request_id, None)
        self._seen.discard(request_id)
        self._limits.pop(request_id, None)
        self._last_ids = ()

    def close(self) -> None:
        remove_small(self._metrics_path)

    def _limits_of(self, requests: Sequence[Any], request_ids: Sequence[str]) -> Ints | None:
        """None if no request has a limit of its own."""
        if request_ids != self._last_ids:
            if not self._seen.issuperset(request_ids):
                for request in requests:
                    self._see(request)
            self._last_ids = request_ids
        if not self._limits:
            return None
        return _array(list(map(self._limits.get, request_ids, repeat(self._max_drafts))))

    def _see(self, request: Any) -> None:
        if request.request_id not in self._seen:
            self._seen.add(request.request_id)
            limit = self._limit(request)
            if limit < self._max_drafts:
                self._limits[request.request_id] = limit

    def _limit(self, request: Any) -> int:
        parameters = request.sampling_params
        options = None if parameters is None else parameters.extra_args
        try:
            return draft_limit(options, self._max_drafts)
        except ValueError as problem:
            if not self._has_logged_bad_option:
                self._has_logged_bad_option = True
                self._log(f"{problem}. Further such values are not logged.")
            return self._max_drafts

    def _look_up(self, requests: Sequence[Any], limits: Ints | None) -> list[list[int]] | None:
        """Drafts from prompt lookup for each request; None if there are none at all."""
        if not self._min_match:
            return None
        found = []
        each_limit = repeat(self._max_drafts) if limits is None else limits.tolist()
        for request, limit in zip(requests, each_limit, strict=False):
            if request.request_id not in self._lookups:
                self._lookups[request.request_id] = PromptLookup(self._min_match)
            index = self._lookups[request.request_id]
            found.append(index.propose(request.all_token_ids, self._max_drafts) if limit else [])
        return found if any(found) else None

    def _record(self, step: Step, drafted: int, outcomes: Outcomes) -> None:
        now = time.monotonic()
        verified, from_lookup = outcomes.verified, outcomes.from_lookup
        sums = self._sums
        sums["steps"] += 1
        sums["drafted"] += drafted
        sums["available"] += step.available
        sums["verified"] += int(verified.sum())
        sums["lookup"] += 0 if from_lookup is None else int(verified[from_lookup].sum())
        sums["accepted"] += int(outcomes.accepted.sum())
        sums["probes"] += step.decision.is_probe
        is_write_due = now - self._written >= WRITE_SECONDS
        is_log_due = now - self._logged >= LOG_SECONDS
        if not (is_write_due or is_log_due):
            return
        self._window.add(now, sums)
        sums.clear()
        metrics = LiveMetrics(
            written=time.time(), gain=step.decision.gain, **self._window.total(now)
        )
        if is_write_due:
            self._written = now
            with disk_errors_logged():
                write_small(metrics, self._metrics_path)
        if is_log_due:
            self._logged = now
            self._log(str(metrics))
