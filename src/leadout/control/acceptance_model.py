"""Acceptance probabilities of drafts, estimated online from what the target accepts.

p_j is the probability that the draft at position j is accepted, given that all before it were; the
product S_j = p_1 · ... · p_j is the survival function. The model keeps exponentially decayed counts
of trials n_j and acceptances a_j, globally and for each request. Drafts that were not verified, and
those behind the first rejection, are no trials.

Globally each position is shrunk towards the one before it, which fills positions without trials:

    p_j = (a_j + w · p_{j-1}) / (n_j + w),    p_0 = 0.7, w = 1.5 trials

A request is shrunk towards the global estimate:

    q_j = (a'_j + w' · p_j) / (n'_j + w'),    w' = 4 trials

Sudden changes would take a half-life to show. Two-sided CUSUM detectors therefore watch the
standardised deviations of all traffic and of each request, and discount history when they fire.

All requests are rows of the same arrays: a step takes the same few numpy calls for any number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

FIRST_PROBABILITY = 0.7  # of the first draft before anything is known: high enough to be tried
PRIOR_TRIALS = 10.0  # weight of a measured curve at each position
POSITION_SHRINKAGE = 1.5  # trials; weight of the position before, in the global estimate
GLOBAL_SHRINKAGE = 4.0  # trials; weight of the global estimate, in that of a request
HALF_LIFE = 45.0  # of trials, in steps
# Change detection, in standard deviations: slack of a step, and thresholds of the sums.
SLACK, GLOBAL_THRESHOLD, REQUEST_THRESHOLD = 0.5, 7.0, 3.5
MIN_VARIANCE = 0.2  # one lucky draft where none was expected is no change
TRIALS_AFTER_CHANGE = 3.0  # what history still counts for, at most, at each position
# Of a larger batch, so many requests are updated in a step and the others in the following ones, so
# that live control takes no more time than it may.
REQUESTS_PER_STEP = 64
_FIRST_ROWS = 64


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """`tokens[k]`: expected tokens of a request in a step that verifies k drafts; `[0]` is 1."""

    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.tokens or self.tokens[0] != 1.0:
            raise ValueError(
                f"an acceptance curve begins with exactly 1 token for no drafts, got {self.tokens}"
            )

    @classmethod
    def from_survival(cls, survival: Sequence[float]) -> AcceptanceCurve:
        """From the probabilities that the first k drafts are all accepted, for k = 1, 2, ..."""
        return cls(tuple(accumulate(survival, initial=1.0)))

    @classmethod
    def from_probabilities(cls, probabilities: Sequence[float]) -> AcceptanceCurve:
        """From the probabilities that draft k is accepted, given that all before it were."""
        return cls.from_survival(list(accumulate(probabilities, mul)))

    def probabilities(self, positions: int) -> list[float]:
        """The inverse of `from_probabilities`; positions beyond the curve are like its last."""
        survival = [self.tokens[k] - self.tokens[k - 1] for k in range(1, len(self.tokens))]
        found, before = [], 1.0
        for here in survival[:positions]:
            found.append(min(max(here / before, 0.0), 1.0) if before > 0 else 0.0)
            before = here
        return found + found[-1:] * (positions - len(found))


class DraftOutcome(NamedTuple):
    """How many drafts of a request were verified in a step, and how many of them accepted."""

    request_id: str
    verified: int
    accepted: int
    from_lookup: bool = False  # prompt lookup made the drafts, not the drafter


class Outcomes:
    """The outcomes of a whole batch, as arrays [requests]."""

    __slots__ = ("accepted", "from_lookup", "request_ids", "verified")

    def __init__(
        self,
        request_ids: Sequence[str],
        verified: Ints,
        accepted: Ints,
        from_lookup: NDArray[np.bool_] | None = None,
    ) -> None:
        """`from_lookup` None: none of them."""
        if (accepted < 0).any() or (accepted > verified).any():
            raise ValueError(
                f"{accepted.tolist()} of {verified.tolist()} verified drafts accepted, expected "
                "0 <= accepted <= verified"
            )
        self.request_ids, self.verified, self.accepted = request_ids, verified, accepted
        self.from_lookup = from_lookup

    @classmethod
    def of(cls, outcomes: Iterable[DraftOutcome]) -> Outcomes:
        rows = list(outcomes)
        if not rows:
            return cls((), np.zeros(0, np.int64), np.zeros(0, np.int64))
        request_ids, verified, accepted, from_lookup = zip(*rows, strict=True)
        return cls(
            request_ids,
            np.array(verified, np.int64),
            np.array(accepted, np.int64),
            np.array(from_lookup) if any(from_lookup) else None,
        )

    def split(self) -> tuple[Outcomes, Outcomes | None]:
        """The drafter's drafts and those of prompt lookup, each with all requests.

        A request whose drafts came from the other source has verified none.
        """
        if self.from_lookup is None:
            return self, None
        parts = [
            Outcomes(
                self.request_ids, np.where(of, self.verified, 0), np.where(of, self.accepted, 0)
            )
            for of in (~self.from_lookup, self.from_lookup)
        ]
        return parts[0], parts[1]


class AcceptanceModel:
    """Survival functions of the drafts of each request."""

    def __init__(self, max_drafts: int, prior: AcceptanceCurve | None = None) -> None:
        if max_drafts < 1:
            raise ValueError(f"max_drafts is {max_drafts}, expected 1 or more")
        self._max_drafts = max_drafts
        # [n, j]: whether draft j is among the first n
        self._first = np.tri(max_drafts + 1, max_drafts, -1)
        self._square = np.arange(1.0, 2 * max_drafts, 2.0)  # 2j - 1
        self._counts = np.zeros((2, max_drafts))  # accepted and trials, of all requests together
        if prior is not None:
            self._counts[1] = PRIOR_TRIALS
            self._counts[0] = PRIOR_TRIALS * np.array(prior.probabilities(max_drafts))
        self._decay = 2 ** (-1 / HALF_LIFE)
        self._above = self._below = 0.0  # CUSUM of all traffic
        # By request. Row 0 takes what arrives for requests that have ended.
        self._rows: dict[str, int] = {}
        self._last_batch: tuple[Sequence[str], Ints] = ((), np.zeros(0, np.int64))
        self._free: list[int] = list(range(_FIRST_ROWS - 1, 0, -1))
        self._state = _RequestArrays.zeros(_FIRST_ROWS, max_drafts)
        self._next_survival = self._next_observation = 0
        self.global_probabilities = np.zeros(max_drafts)  # p_j over all requests
        self._update_global()

    def trials(self, request_ids: Sequence[str]) -> Floats:
        """Decayed numbers of times that the requests' first drafts were verified."""
        found: Floats = self._state.trials[self._rows_of(request_ids), 0]
        return found

    def survival(self, request_ids: Sequence[str]) -> Floats:
        """[requests, j]: probability that drafts 1 to j + 1 of a request are all accepted."""
        rows, state = self._rows_of(request_ids), self._state
        part, self._next_survival, _ = _turn(len(rows), self._next_survival)
        some = rows[part]
        estimate = state.trials[some]
        estimate += GLOBAL_SHRINKAGE
        np.divide(
            state.accepted[some] + GLOBAL_SHRINKAGE * self.global_probabilities,
            estimate,
            out=estimate,
        )
        np.cumprod(estimate, axis=1, out=estimate)
        state.survival[some] = estimate
        return estimate if len(some) == len(rows) else state.survival[rows]

    def observe(self, outcomes: Outcomes) -> None:
        """One step of the whole batch. Only requests whose survival was asked for are known."""
        verified, accepted = outcomes.verified, outcomes.accepted
        self._observe_requests(outcomes)
        reached = np.minimum(accepted + 1, verified)
        # [j]: requests that verified draft j after all before it were accepted, and accepted it
        trials, hits = (
            np.bincount(each, minlength=self._max_drafts + 1)[:0:-1].cumsum()[::-1]
            for each in (reached, accepted)
        )
        if not trials[0]:
            return
        expected = self.global_probabilities
        deviation = float((hits - trials * expected).sum())
        variance = float((trials * expected * (1 - expected)).sum())
        if self._detects_change(deviation / max(variance, 0.05) ** 0.5):
            self.discount_history()
        self._counts *= self._decay
        self._counts[0] += hits
        self._counts[1] += trials
        self._update_global()

    def discount_history(self) -> None:
        """Traffic has changed: let what was learnt before count for little."""
        self._counts *= _share_kept(self._counts[1])
        self._state.discount(slice(None))
        self._update_global()

    def forget(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._state.clear(row)
            self._free.append(row)
            self._last_batch = ((), self._last_batch[1])

    def _rows_of(self, request_ids: Sequence[str]) -> Ints:
        if request_ids == self._last_batch[0]:  # as in most steps
            return self._last_batch[1]
        known = self._rows
        for each in request_ids:
            if each not in known:
                known[each] = self._new_row()
        rows = np.array([known[each] for each in request_ids], np.int64)
        self._last_batch = (request_ids, rows)
        return rows

    def _new_row(self) -> int:
        if not self._free:
            size = len(self._state.trials)
            self._state = self._state.doubled()
            self._free = list(range(2 * size - 1, size - 1, -1))
        row = self._free.pop()
        self._state.survival[row] = np.cumprod(self.global_probabilities)
        return row

    def _observe_requests(self, outcomes: Outcomes) -> None:
        known, state = self._rows, self._state
        part, self._next_observation, turns = _turn(
            len(outcomes.request_ids), self._next_observation
        )
        if outcomes.request_ids == self._last_batch[0]:
            rows = self._last_batch[1][part]
        else:
            rows = np.array([known.get(each, 0) for each in outcomes.request_ids[part]], np.int64)
        verified, accepted = outcomes.verified[part], outcomes.accepted[part]
        if verified.any():
            # Of N accepted drafts, E[N] = Σ S_j and E[N²] = Σ (2j - 1) S_j.
            survival = state.survival[rows]
            survival *= self._first[verified]
            mean = survival.sum(axis=1)
            variance = np.maximum(survival @ self._square - mean * mean, MIN_VARIANCE)
            deviation = np.where(verified, (accepted - mean) / np.sqrt(variance), 0.0)
            above = np.maximum(state.above[rows] + deviation - SLACK, 0.0)
            below = np.maximum(state.below[rows] - deviation - SLACK, 0.0)
            changed = np.maximum(above, below) > REQUEST_THRESHOLD
            if changed.any():
                above[changed] = below[changed] = 0.0
                state.discount(rows[changed])
            state.above[rows], state.below[rows] = above, below
        decay = self._decay**turns
        state.accepted[rows] = state.accepted[rows] * decay + self._first[accepted]
        reached = np.minimum(accepted + 1, verified)
        state.trials[rows] = state.trials[rows] * decay + self._first[reached]

    def _detects_change(self, deviation: float) -> bool:
        self._above = max(self._above + deviation - SLACK, 0.0)
        self._below = max(self._below - deviation - SLACK, 0.0)
        if max(self._above, self._below) <= GLOBAL_THRESHOLD:
            return False
        self._above = self._below = 0.0
        return True

    def _update_global(self) -> None:
        estimate, found = FIRST_PROBABILITY, []
        for accepted, trials in self._counts.T.tolist():
            estimate = (accepted + POSITION_SHRINKAGE * estimate) / (trials + POSITION_SHRINKAGE)
            found.append(estimate)
        self.global_probabilities = np.array(found)


@dataclass(slots=True)
class _RequestArrays:
    """What is known about requests, a row for each."""

    accepted: Floats  # [rows, drafts], decayed
    trials: Floats  # [rows, drafts], decayed
    survival: Floats  # [rows, drafts], as last computed
    above: Floats  # [rows], CUSUM of deviations
    below: Floats  # [rows]

    @classmethod
    def zeros(cls, rows: int, max_drafts: int) -> _RequestArrays:
        accepted, trials, survival = np.zeros((3, rows, max_drafts))
        return cls(accepted, trials, survival, np.zeros(rows), np.zeros(rows))

    def doubled(self) -> _RequestArrays:
        arrays = (self.accepted, self.trials, self.survival, self.above, self.below)
        return _RequestArrays(*(np.concatenate([each, np.zeros_like(each)]) for each in arrays))

    def discount(self, rows: Ints | slice) -> None:
        kept = _share_kept(self.trials[rows])
        self.accepted[rows] *= kept
        self.trials[rows] *= kept

    def clear(self, row: int) -> None:
        self.accepted[row] = self.trials[row] = 0.0
        self.above[row] = self.below[row] = 0.0


def _share_kept(trials: Floats) -> Floats:
    return np.minimum(1.0, TRIALS_AFTER_CHANGE / np.maximum(trials, 1e-9))


def _turn(count: int, start: int) -> tuple[slice, int, int]:
    """The requests of a batch whose turn it is, where the next turn starts, and turns in all."""
    if count <= REQUESTS_PER_STEP:
        return slice(0, count), 0, 1
    start = start if start < count else 0
    return (
        slice(start, start + REQUESTS_PER_STEP),
        start + REQUESTS_PER_STEP,
        -(-count // REQUESTS_PER_STEP),
    )
