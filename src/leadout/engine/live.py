"""Live control: connects vLLM's scheduler with the draft-length policy, without importing vLLM.

The scheduler calls `LiveControl.plan` before a step and `LiveControl.step_done` after it; vLLM's
requests are known by their attributes only. What live control did over the last minute goes to the
log and, through a small file, to `/metrics` in the API process. Requests can limit their own drafts
(`draft_limit`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from leadout.control.acceptance_model import DraftOutcome
from leadout.control.policy import Decision, DecodingRequest, Policy
from leadout.control.prompt_lookup import PromptLookup
from leadout.engine.counters import (
    WINDOW_SECONDS,
    SlidingWindow,
    read_small,
    small_file,
    write_small,
)

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

    request_ids: tuple[str, ...]
    decision: Decision
    available: int  # drafts of the drafter that could be verified
    started: float


@dataclass(frozen=True, slots=True)
class Drafts:
    """What one request verifies: the first of the drafter's drafts, or those of prompt lookup."""

    tokens: list[int]
    from_lookup: bool


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
        self._limits: dict[str, int] = {}
        self._window: SlidingWindow[str] = SlidingWindow()
        self._written = float("-inf")
        self._logged = time.monotonic()
        self._last_end = 0.0  # when the last step's output arrived
        self._has_logged_bad_option = False

    def plan(self, requests: Sequence[Any]) -> tuple[Step, list[Drafts]]:
        """The next step of the decoding requests, and what each of them verifies in it."""
        decoding, proposals = [], []
        for request in requests:
            limit = self._limit(request)
            proposal = self._look_up(request) if limit else []
            proposals.append(proposal)
            available = len(request.spec_token_ids)
            decoding.append(DecodingRequest(request.request_id, available, limit, len(proposal)))
        decision = self._policy.decide(decoding)
        chosen = []
        for request, count, proposal, use_lookup in zip(
            requests, decision.verify, proposals, decision.use_lookup, strict=True
        ):
            drafts = proposal if use_lookup else request.spec_token_ids
            chosen.append(Drafts(list(drafts[:count]), use_lookup))
        step = Step(
            request_ids=tuple(each.request_id for each in decoding),
            decision=decision,
            available=sum(each.available for each in decoding),
            started=time.perf_counter(),
        )
        return step, chosen

    def step_done(
        self, step: Step, verified: Mapping[str, int], sampled: Mapping[str, int], *, is_pure: bool
    ) -> None:
        """Learn from a step: by request, drafts that the engine really verified and new tokens.

        `is_pure`: the step did nothing but decode as decided, so that its time is the cost of
        decoding.
        """
        ended = time.perf_counter()
        # With several steps in flight, one effectively starts when the one before it ends.
        seconds = ended - max(step.started, self._last_end)
        self._last_end = ended
        decision, outcomes = step.decision, []
        for request_id, planned, use_lookup in zip(
            step.request_ids, decision.verify, decision.use_lookup, strict=True
        ):
            tokens = sampled.get(request_id, 0)
            if not tokens:
                is_pure = False  # aborted, or its output was dropped
                continue
            count = min(verified.get(request_id, 0), planned)
            outcomes.append(DraftOutcome(request_id, count, min(tokens - 1, count), use_lookup))
        self._policy.observe(outcomes, decision.draft, seconds if is_pure else None)
        self._record(step, outcomes)

    def forget(self, request_id: str) -> None:
        """Drop what is known about a request that has ended."""
        self._policy.forget(request_id)
        self._lookups.pop(request_id, None)
        self._limits.pop(request_id, None)

    def close(self) -> None:
        self._metrics_path.unlink(missing_ok=True)

    def _limit(self, request: Any) -> int:
        known = self._limits.get(request.request_id)
        if known is not None:
            return known
        parameters = request.sampling_params
        options = None if parameters is None else parameters.extra_args
        try:
            limit = draft_limit(options, self._max_drafts)
        except ValueError as problem:
            limit = self._max_drafts
            if not self._has_logged_bad_option:
                self._has_logged_bad_option = True
                self._log(f"{problem}. Further such values are not logged.")
        self._limits[request.request_id] = limit
        return limit

    def _look_up(self, request: Any) -> list[int]:
        if not self._min_match:
            return []
        if request.request_id not in self._lookups:
            self._lookups[request.request_id] = PromptLookup(self._min_match)
        return self._lookups[request.request_id].propose(request.all_token_ids, self._max_drafts)

    def _record(self, step: Step, outcomes: Sequence[DraftOutcome]) -> None:
        now = time.monotonic()
        self._window.add(
            now,
            {
                "steps": 1,
                "drafted": step.decision.draft,
                "available": step.available,
                "verified": sum(each.verified for each in outcomes),
                "lookup": sum(each.verified for each in outcomes if each.from_lookup),
                "accepted": sum(each.accepted for each in outcomes),
                "probes": int(step.decision.is_probe),
            },
        )
        is_write_due = now - self._written >= WRITE_SECONDS
        is_log_due = now - self._logged >= LOG_SECONDS
        if not (is_write_due or is_log_due):
            return
        metrics = LiveMetrics(
            written=time.time(), gain=step.decision.gain, **self._window.total(now)
        )
        if is_write_due:
            self._written = now
            write_small(metrics, self._metrics_path)
        if is_log_due:
            self._logged = now
            self._log(str(metrics))
