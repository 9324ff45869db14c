"""Acceptance probabilities of drafts, estimated online from what the target accepts.

p_j is the probability that the draft at position j is accepted, given that all before it were; the
product S_j = p_1 · ... · p_j is the survival function. Drafts that were not verified, and those
behind the first rejection, are no trials.

Requests differ, and so do parts of one request. Each request has a score in [0, 1], an
exponentially decayed mean of a / t over its steps, with a accepted drafts in t trials, which starts
at the mean of all traffic m with a weight of w' steps:

    score = (Σ a/t + w' · m) / (Σ 1 + w')

Requests with similar scores form a group, and each group has its own probabilities, from all trials
n_j and acceptances a_j of the requests that were in it when they were verified:

    p_j = (a_j + w · c) / (n_j + w),    c: the score in the middle of the group

A group's probabilities are right whatever its scores mean: requests that got a high score by luck
show in the counts of that group. After a change of traffic, requests move to other groups within a
few steps, and those already know what to expect; no change has to be detected.

A step takes the same few numpy calls for any number of requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

GROUPS = 8
FIRST_SCORE = 0.7  # before anything is known: high enough to be tried
SCORE_HALF_LIFE = 15.0  # steps
SCORE_PRIOR_STEPS = 1.0  # w': weight of the mean of all traffic in a request's score
GROUP_PRIOR_TRIALS = 4.0  # w
HALF_LIFE = 50.0  # of trials, in steps
POSITION_PRIOR_TRIALS = 2.0
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
        self.request_ids, self.verified, self.accepted = request_ids, verified, accepted
        self.from_lookup = from_lookup

    @classmethod
    def of(cls, outcomes: Iterable[DraftOutcome]) -> Outcomes:
        rows = list(outcomes)
        if not rows:
            return cls((), np.zeros(0, np.int64), np.zeros(0, np.int64))
        request_ids, verified, accepted, from_lookup = zip(*rows, strict=True)
        if not all(0 <= row.accepted <= row.verified for row in rows):
            raise ValueError(
                f"{accepted} of {verified} verified drafts accepted, expected "
                "0 <= accepted <= verified"
            )
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
    """Groups of requests, and the survival function of each group's drafts."""

    def __init__(self, max_drafts: int, prior: AcceptanceCurve | None = None) -> None:
        """`prior`: what `leadout tune` measured, expected of new requests."""
        if max_drafts < 1:
            raise ValueError(f"max_drafts is {max_drafts}, expected 1 or more")
        self._max_drafts = max_drafts
        self._decay = 2 ** (-1 / SCORE_HALF_LIFE)
        self._forget = 2 ** (-1 / HALF_LIFE)
        self._steps_to_decay = 0  # since drafts were verified
        # [2, groups, drafts]: trials, and those that were accepted
        self._counts: Floats = np.zeros((2, GROUPS, max_drafts))
        self._prior: Floats = np.empty((GROUPS, max_drafts))  # p_j of a group without trials
        self._prior[:, 0] = (np.arange(GROUPS) + 0.5) / GROUPS
        self._all_steps, self._all_score = 1.0, FIRST_SCORE  # decayed weight and sum of all traffic
        if prior is not None:
            probabilities = np.array(prior.probabilities(max_drafts))
            self._all_score = _expected_score(probabilities.tolist())
            first = _group(self._all_score)
            self._counts[0, first] = GROUP_PRIOR_TRIALS
            self._counts[1, first] = GROUP_PRIOR_TRIALS * probabilities
        self._survival: Floats | None = None  # None: not computed since the last step
        # By request. Row 0 takes what arrives for requests that have ended.
        self._rows: dict[str, int] = {}
        self._last_batch: tuple[Sequence[str], Ints] = ((), np.zeros(0, np.int64))
        self._free: list[int] = list(range(_FIRST_ROWS - 1, 0, -1))
        self._scores, self._steps = np.zeros((2, _FIRST_ROWS))  # decayed sums
        self._groups = np.zeros(_FIRST_ROWS, np.int64)

    @property
    def survival(self) -> Floats:
        """[groups, j]: the probability that drafts 1 to j + 1 of a request are all accepted."""
        if self._survival is None:
            estimate, mean, weight = FIRST_SCORE, [], POSITION_PRIOR_TRIALS
            for trials, accepted in zip(*self._counts.sum(axis=1).tolist(), strict=True):
                estimate = (accepted + weight * estimate) / (trials + weight)
                mean.append(estimate)
            self._prior[:, 1:] = mean[1:]
            found = self._counts[1] + GROUP_PRIOR_TRIALS * self._prior
            found /= self._counts[0] + GROUP_PRIOR_TRIALS
            self._survival = np.cumprod(found, axis=1)
        return self._survival

    def groups(self, request_ids: Sequence[str]) -> Ints:
        """[requests]: the group of each."""
        rows = self._rows_of(request_ids)  # may replace the arrays by larger ones
        found: Ints = self._groups[rows]
        return found

    def observe(self, outcomes: Outcomes) -> None:
        """One step of the whole batch. Only requests whose group was asked for are known."""
        verified, accepted = outcomes.verified, outcomes.accepted
        self._steps_to_decay += 1
        if not verified.any():
            return
        decay = self._decay**self._steps_to_decay
        self._steps_to_decay = 0
        if outcomes.request_ids == self._last_batch[0]:  # as in most steps
            rows = self._last_batch[1]
        else:
            known = self._rows
            rows = np.array([known.get(each, 0) for each in outcomes.request_ids], np.int64)
        reached = np.minimum(accepted + 1, verified)
        self._count(self._groups[rows], reached, accepted)
        weights = (verified > 0).astype(np.float64)
        shares = accepted / np.maximum(reached, 1)
        self._all_steps = decay * self._all_steps + float(weights.sum())
        self._all_score = decay * self._all_score + float(shares.sum())
        steps = decay * self._steps[rows] + weights
        scores = decay * self._scores[rows] + shares
        self._steps[rows], self._scores[rows] = steps, scores
        mean = self._all_score / self._all_steps
        scores += SCORE_PRIOR_STEPS * mean
        scores *= GROUPS / (steps + SCORE_PRIOR_STEPS)
        self._groups[rows] = np.minimum(scores, GROUPS - 1)

    def forget(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)
            self._last_batch = ((), self._last_batch[1])

    def _count(self, groups: Ints, reached: Ints, accepted: Ints) -> None:
        """Add a step's trials and acceptances to the groups that the requests were in."""
        width = self._max_drafts + 1
        cells = np.concatenate([groups * width + reached, (groups + GROUPS) * width + accepted])
        found = np.bincount(cells, minlength=2 * GROUPS * width).reshape(2, GROUPS, width)
        # From the requests with exactly n drafts to those with at least so many.
        self._counts *= self._forget
        self._counts += found[:, :, :0:-1].cumsum(axis=2)[:, :, ::-1]
        self._survival = None

    def _rows_of(self, request_ids: Sequence[str]) -> Ints:
        if request_ids == self._last_batch[0]:
            return self._last_batch[1]
        known = self._rows
        if not known.keys() >= set(request_ids):
            for each in request_ids:
                if each not in known:
                    known[each] = self._new_row()
        rows = np.array(array("q", map(known.__getitem__, request_ids)))
        self._last_batch = (request_ids, rows)
        return rows

    def _new_row(self) -> int:
        if not self._free:
            size = len(self._steps)
            self._scores, self._steps, self._groups = (
                np.concatenate([each, np.zeros_like(each)])
                for each in (self._scores, self._steps, self._groups)
            )
            self._free = list(range(2 * size - 1, size - 1, -1))
        row = self._free.pop()
        self._scores[row] = self._steps[row] = 0.0
        self._groups[row] = _group(self._all_score / self._all_steps)
        return row


def _expected_score(probabilities: Sequence[float]) -> float:
    """Of a step that verifies so many drafts, if they are accepted with these probabilities."""
    survival, found = 1.0, 0.0
    for accepted, probability in enumerate(probabilities):
        found += survival * (1 - probability) * accepted / (accepted + 1)
        survival *= probability
    return found + survival


def _group(score: float) -> int:
    return min(int(score * GROUPS), GROUPS - 1)
