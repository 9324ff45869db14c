"""Acceptance probabilities of drafts, estimated online from what the target accepts.

p_j is the probability that the draft at position j is accepted, given that all before it were; the
product S_j = p_1 · ... · p_j is the survival function. The model keeps exponentially decayed counts
of trials n_j and acceptances a_j, globally and for each request. Drafts that were not verified, and
those behind the first rejection, are no trials.

Globally each position is shrunk towards the one before it, which fills positions without trials:

    p_j = (a_j + w · p_{j-1}) / (n_j + w),    p_0 = 0.7, w = 1.5 trials

A request is shrunk towards the global estimate, shifted by how much better or worse the request was
at the position before:

    q_j = (a'_j + w' · m_j) / (n'_j + w'),    m_j = clip(p_j + q_{j-1} - p_{j-1}, 0, 1), w' = 4

Sudden changes would take a half-life to show. Two-sided CUSUM detectors therefore watch the
standardised deviations of all traffic and of each request, and discount history when they fire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import sqrt
from operator import mul

FIRST_PROBABILITY = 0.7  # of the first draft before anything is known: high enough to be tried
PRIOR_TRIALS = 10.0  # weight of a measured curve at each position
POSITION_SHRINKAGE = 1.5  # trials; weight of the position before, in the global estimate
GLOBAL_SHRINKAGE = 4.0  # trials; weight of the global estimate, in that of a request
# Half-lives of trials, in steps.
GLOBAL_HALF_LIFE = 60.0
REQUEST_HALF_LIFE = 45.0
IDLE_HALF_LIFE = 60.0  # of a request whose drafts are not verified
REQUESTS_PER_UPDATE_STEP = 16  # a batch of n requests is updated every 1 + n // 16 steps
# Change detection, in standard deviations: slack of a step, and threshold of the sum.
GLOBAL_SLACK, GLOBAL_THRESHOLD = 0.5, 7.0
REQUEST_SLACK, REQUEST_THRESHOLD = 0.5, 3.5
MIN_VARIANCE = 0.2  # one lucky draft where none was expected is no change
# After a change: cap on the global trials of a position, and factor on the trials of a request.
MAX_TRIALS_AFTER_CHANGE = 3.0
REQUEST_FACTOR_AFTER_CHANGE = 0.1

_GLOBAL_GROWTH = 2 ** (1 / GLOBAL_HALF_LIFE)
_REQUEST_GROWTH = 2 ** (1 / REQUEST_HALF_LIFE)
_IDLE_GROWTH = 2 ** (1 / IDLE_HALF_LIFE)


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


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """How many drafts of a request were verified in a step, and how many of them accepted."""

    request_id: str
    verified: int
    accepted: int
    from_lookup: bool = False  # prompt lookup made the drafts, not the drafter

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.verified:
            raise ValueError(
                f"request {self.request_id}: {self.accepted} of {self.verified} verified drafts "
                "accepted, expected 0 <= accepted <= verified"
            )


@dataclass(slots=True)
class DecayedCounts:
    """Exponentially decayed trials and acceptances by draft position.

    Instead of shrinking all old counts, `decay` lets the weight of new ones grow: every ratio is
    the same, and a step costs one multiplication.
    """

    accepted: list[float]
    trials: list[float]
    weight: float = 1.0

    @classmethod
    def zeros(cls, positions: int) -> DecayedCounts:
        return cls([0.0] * positions, [0.0] * positions)

    def decay(self, growth: float) -> None:
        """Divide the weight of everything so far by `growth`."""
        self.weight *= growth
        if self.weight > 1e9:
            self.accepted = [accepted / self.weight for accepted in self.accepted]
            self.trials = [trials / self.weight for trials in self.trials]
            self.weight = 1.0

    def cap_trials(self, max_trials: float) -> None:
        """Reduce each position to at most `max_trials`, with the same share accepted."""
        for position, trials in enumerate(self.trials):
            if trials > max_trials * self.weight:
                self.accepted[position] *= max_trials * self.weight / trials
                self.trials[position] = max_trials * self.weight

    def add(self, verified: int, accepted: int) -> None:
        weight, accepted_counts, trials = self.weight, self.accepted, self.trials
        for position in range(accepted):
            accepted_counts[position] += weight
            trials[position] += weight
        if accepted < verified:
            trials[accepted] += weight

    def merge(self, other: DecayedCounts) -> None:
        """Add counts of weight 1."""
        weight = self.weight
        for position, trials in enumerate(other.trials):
            self.accepted[position] += weight * other.accepted[position]
            self.trials[position] += weight * trials


@dataclass(slots=True)
class Cusum:
    """A two-sided CUSUM change detector over standardised deviations."""

    slack: float
    threshold: float
    above: float = 0.0
    below: float = 0.0

    def detects(self, deviation: float) -> bool:
        """Whether deviations to one side add up to a change; starts anew after one."""
        self.above = max(0.0, self.above + deviation - self.slack)
        self.below = max(0.0, self.below - deviation - self.slack)
        if max(self.above, self.below) < self.threshold:
            return False
        self.above = self.below = 0.0
        return True


@dataclass(slots=True)
class _RequestState:
    """A request's counts, and the survival function last computed from them."""

    counts: DecayedCounts
    survival: tuple[float, ...] = ()
    version: int = -1  # of the global estimate that `survival` is based on
    change: Cusum = field(default_factory=lambda: Cusum(REQUEST_SLACK, REQUEST_THRESHOLD))

    def detects_change(self, verified: int, accepted: int) -> bool:
        """The number of accepted drafts N has E[N] = Σ S_j and E[N²] = Σ (2j - 1) S_j."""
        mean, mean_square = 0.0, 0.0
        for position, survival in enumerate(self.survival[:verified]):
            mean += survival
            mean_square += (2 * position + 1) * survival
        variance = max(mean_square - mean * mean, MIN_VARIANCE)
        return self.change.detects((accepted - mean) / sqrt(variance))


class AcceptanceModel:
    """Survival functions of the drafts of each request."""

    def __init__(self, max_drafts: int, prior: AcceptanceCurve | None = None) -> None:
        if max_drafts < 1:
            raise ValueError(f"max_drafts is {max_drafts}, expected 1 or more")
        self._max_drafts = max_drafts
        self._counts = DecayedCounts.zeros(max_drafts)
        if prior is not None:
            for position, probability in enumerate(prior.probabilities(max_drafts)):
                self._counts.accepted[position] = PRIOR_TRIALS * probability
                self._counts.trials[position] = PRIOR_TRIALS
        self._requests: dict[str, _RequestState] = {}
        self._change = Cusum(GLOBAL_SLACK, GLOBAL_THRESHOLD)
        self._version = self._steps_since_update = 0
        self.global_probabilities: list[float] = []  # p_j over all requests
        self._global_survival: tuple[float, ...] = ()
        self._update_global()

    def trials(self, request_id: str) -> float:
        """Decayed number of times that a request's first draft was verified."""
        state = self._requests.get(request_id)
        return state.counts.trials[0] / state.counts.weight if state is not None else 0.0

    def survival(self, request_id: str) -> tuple[float, ...]:
        """[j]: probability that drafts 1 to j + 1 of a request are all accepted."""
        state = self._requests.get(request_id)
        if state is None:
            return self._global_survival
        if state.version != self._version:
            counts = state.counts
            shrinkage = counts.weight * GLOBAL_SHRINKAGE
            shift, product, survival = 0.0, 1.0, []
            for accepted, trials, probability in zip(
                counts.accepted, counts.trials, self.global_probabilities, strict=True
            ):
                expected = min(max(probability + shift, 0.0), 1.0)
                estimate = (accepted + shrinkage * expected) / (trials + shrinkage)
                shift = estimate - probability
                product *= estimate
                survival.append(product)
            state.survival, state.version = tuple(survival), self._version
        return state.survival

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """One step of the whole batch."""
        step = DecayedCounts.zeros(self._max_drafts)
        self._steps_since_update += 1
        for outcome in outcomes:
            state = self._requests.get(outcome.request_id)
            verified, accepted = outcome.verified, outcome.accepted
            if verified:
                step.add(verified, accepted)
                if state is None:
                    counts = DecayedCounts.zeros(self._max_drafts)
                    state = self._requests[outcome.request_id] = _RequestState(counts)
                elif state.survival and state.detects_change(verified, accepted):
                    state.counts.decay(1 / REQUEST_FACTOR_AFTER_CHANGE)
                state.counts.decay(_REQUEST_GROWTH)
                state.counts.add(verified, accepted)
            elif state is not None:
                state.counts.decay(_IDLE_GROWTH)
        if step.trials[0]:
            if self._detects_change(step):
                self.discount_history()
            self._counts.decay(_GLOBAL_GROWTH)
            self._counts.merge(step)
            # In a large batch one step changes each estimate little, and updating all takes time.
            if self._steps_since_update > len(outcomes) // REQUESTS_PER_UPDATE_STEP:
                self._update_global()

    def discount_history(self) -> None:
        """Traffic has changed: let what was learnt before count for little."""
        self._counts.cap_trials(MAX_TRIALS_AFTER_CHANGE)
        for state in self._requests.values():
            state.counts.decay(1 / REQUEST_FACTOR_AFTER_CHANGE)
        self._update_global()

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def _detects_change(self, step: DecayedCounts) -> bool:
        deviation, variance = 0.0, 0.05
        for probability, accepted, trials in zip(
            self.global_probabilities, step.accepted, step.trials, strict=True
        ):
            deviation += accepted - trials * probability
            variance += trials * probability * (1 - probability)
        return self._change.detects(deviation / sqrt(variance))

    def _update_global(self) -> None:
        self._version += 1
        self._steps_since_update = 0
        estimate, self.global_probabilities = FIRST_PROBABILITY, []
        shrinkage = POSITION_SHRINKAGE * self._counts.weight
        for accepted, trials in zip(self._counts.accepted, self._counts.trials, strict=True):
            estimate = (accepted + shrinkage * estimate) / (trials + shrinkage)
            self.global_probabilities.append(estimate)
        self._global_survival = tuple(accumulate(self.global_probabilities, mul))
