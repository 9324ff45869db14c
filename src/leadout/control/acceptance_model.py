"""How many tokens a step brings, by how many are drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from operator import mul


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """`tokens[k]`: tokens a request gains in a step that verifies k drafts; `tokens[0]` is 1."""

    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.tokens or self.tokens[0] != 1.0:
            raise ValueError(
                f"acceptance curve: found {self.tokens[:1]} for no draft, wanted exactly 1 token"
            )

    @classmethod
    def of_survival(cls, survival: Sequence[float]) -> AcceptanceCurve:
        """From the chance that the first k drafts stand together, for k = 1, 2, ..."""
        return cls(tuple(accumulate(survival, initial=1.0)))

    @classmethod
    def of_odds(cls, odds: Sequence[float]) -> AcceptanceCurve:
        """From the chance that draft k stands where all before it did."""
        return cls.of_survival(list(accumulate(odds, mul)))

    @property
    def most(self) -> int:
        """The largest K that the curve knows."""
        return len(self.tokens) - 1


# The odds of drafts, learnt from what the target accepted.
#
# For each draft position: the chance that it stands where all before it stood. Those of all traffic
# lean on the position before; what has not been looked at for long is believed to be like its
# neighbour, and worth another look. Those of a request lean on all traffic, and are believed to be
# as much better or worse as they were at the position before. Old looks are forgotten.
#
# A position that was not verified, or that came after the first refusal, teaches nothing.

UNSEEN_ODDS = 0.7  # of the first draft before anything is known: high enough to be tried
PRIOR_WEIGHT = 10.0  # looks at each position that a measured curve is worth
NEIGHBOUR_WEIGHT = 1.5  # looks, for all traffic
TRAFFIC_WEIGHT = 4.0  # looks, for a request
# Steps after which half of a look is forgotten.
TRAFFIC_HALF_LIFE = 60.0
REQUEST_HALF_LIFE = 45.0
IDLE_HALF_LIFE = 60.0  # of a request whose drafts are not verified
DERIVE_REQUESTS = 16  # for each so many, a step between two derivations
# A change of all traffic at once: deviations that add up, less a slack for each step.
CHANGE_SLACK, CHANGE_ALARM = 0.5, 7.0
OWN_AFTER_CHANGE = 0.1  # of the looks at single requests that still count
# The same for a single request that goes on with something else.
OWN_SLACK, OWN_ALARM = 0.5, 3.5
LEAST_VARIANCE = 0.2  # a single lucky draft where none is expected is no change
BELIEVED_LOOKS = 3.0  # at all traffic that still count, at most


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request's drafts came to in one step."""

    request: str
    verified: int
    accepted: int
    copied: bool = False  # not the drafter's

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.verified:
            raise ValueError(
                f"outcome of request {self.request}: found {self.accepted} accepted of "
                f"{self.verified} verified drafts, wanted 0 <= accepted <= verified"
            )


@dataclass(slots=True)
class Counts:
    """Looks at each position, and how many of them were accepted.

    A new look weighs `weight`, which grows as time passes: the same as if the old ones faded.
    """

    stood: list[float]
    looked: list[float]
    weight: float = 1.0

    @classmethod
    def none(cls, positions: int) -> Counts:
        return cls([0.0] * positions, [0.0] * positions)

    def age(self, growth: float) -> None:
        self.weight *= growth
        if self.weight > 1e9:
            self.stood = [stood / self.weight for stood in self.stood]
            self.looked = [looked / self.weight for looked in self.looked]
            self.weight = 1.0

    def shrink(self, looks: float) -> None:
        """At most so many looks at a position, with the odds they have."""
        for position, looked in enumerate(self.looked):
            if looked > looks * self.weight:
                self.stood[position] *= looks * self.weight / looked
                self.looked[position] = looks * self.weight

    def add(self, verified: int, accepted: int) -> None:
        weight, stood, looked = self.weight, self.stood, self.looked
        for position in range(accepted):
            stood[position] += weight
            looked[position] += weight
        if accepted < verified:
            looked[accepted] += weight

    def join(self, other: Counts) -> None:
        """Add looks that weigh 1 each."""
        weight = self.weight
        for position, looked in enumerate(other.looked):
            self.stood[position] += weight * other.stood[position]
            self.looked[position] += weight * looked


@dataclass(slots=True)
class _Own:
    """A request's counts and the survival last derived from them."""

    counts: Counts
    survival: tuple[float, ...] = ()
    version: int = -1
    above: float = 0.0
    below: float = 0.0

    def is_surprised_by(self, verified: int, accepted: int) -> bool:
        """Whether its steps have deviated to one side for too long to be chance."""
        mean, square = 0.0, 0.0
        for position, left in enumerate(self.survival[:verified]):
            mean += left
            square += (2 * position + 1) * left
        deviation = (accepted - mean) / sqrt(max(square - mean * mean, LEAST_VARIANCE))
        self.above = max(0.0, self.above + deviation - OWN_SLACK)
        self.below = max(0.0, self.below - deviation - OWN_SLACK)
        if max(self.above, self.below) < OWN_ALARM:
            return False
        self.above = self.below = 0.0
        return True


class Acceptance:
    """Survival of draft positions per request: the chance that drafts 1..j all stand."""

    def __init__(self, most: int, prior: AcceptanceCurve | None = None) -> None:
        if most < 1:
            raise ValueError(f"acceptance estimate: found {most} draft positions, wanted 1 or more")
        self._most = most
        self._traffic = Counts.none(most)
        for position, odds in enumerate(_odds_of(prior, most)):
            self._traffic.stood[position] = PRIOR_WEIGHT * odds
            self._traffic.looked[position] = PRIOR_WEIGHT
        self._own: dict[str, _Own] = {}
        self._above = self._below = 0.0
        self._version = self._since_derived = 0
        self._odds: list[float] = []
        self._unseen: tuple[float, ...] = ()
        self._derive()

    @property
    def traffic_odds(self) -> Sequence[float]:
        """Odds by position over all requests."""
        return self._odds

    def looks(self, request: str) -> float:
        """How often a request's first draft was verified, old looks counting less."""
        own = self._own.get(request)
        return own.counts.looked[0] / own.counts.weight if own is not None else 0.0

    def survival(self, request: str) -> tuple[float, ...]:
        own = self._own.get(request)
        if own is None:
            return self._unseen
        if own.version != self._version:
            counts = own.counts
            leaned = counts.weight * TRAFFIC_WEIGHT
            better, left, survival = 0.0, 1.0, []
            for stood, looked, odds in zip(counts.stood, counts.looked, self._odds, strict=True):
                # As much better or worse than all traffic as at the position before.
                expected = min(max(odds + better, 0.0), 1.0)
                mine = (stood + leaned * expected) / (looked + leaned)
                better = mine - odds
                left *= mine
                survival.append(left)
            own.survival, own.version = tuple(survival), self._version
        return own.survival

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """One step of the whole batch."""
        step = Counts.none(self._most)
        self._since_derived += 1
        for outcome in outcomes:
            own = self._own.get(outcome.request)
            verified, accepted = outcome.verified, outcome.accepted
            if verified:
                step.add(verified, accepted)
                if own is None:
                    own = self._own[outcome.request] = _Own(Counts.none(self._most))
                elif own.survival and own.is_surprised_by(verified, accepted):
                    own.counts.age(1 / OWN_AFTER_CHANGE)
                own.counts.age(_REQUEST_GROWTH)
                own.counts.add(verified, accepted)
            elif own is not None:
                own.counts.age(_IDLE_GROWTH)
        if step.looked[0]:
            if self._is_surprised_by(step):
                self.doubt()
            self._traffic.age(_TRAFFIC_GROWTH)
            self._traffic.join(step)
            # One step in a large batch says little of each request; deriving all takes time.
            if self._since_derived > len(outcomes) // DERIVE_REQUESTS:
                self._derive()

    def _is_surprised_by(self, step: Counts) -> bool:
        """Whether steps have deviated to one side for too long to be chance."""
        off, variance = 0.0, 0.05
        for odds, stood, looked in zip(self._odds, step.stood, step.looked, strict=True):
            off += stood - looked * odds
            variance += looked * odds * (1 - odds)
        deviation = off / sqrt(variance)
        self._above = max(0.0, self._above + deviation - CHANGE_SLACK)
        self._below = max(0.0, self._below - deviation - CHANGE_SLACK)
        if max(self._above, self._below) < CHANGE_ALARM:
            return False
        self._above = self._below = 0.0
        return True

    def doubt(self) -> None:
        """Something has changed: what was believed of all requests counts for little now."""
        self._traffic.shrink(BELIEVED_LOOKS)
        for own in self._own.values():
            own.counts.age(1 / OWN_AFTER_CHANGE)
        self._derive()

    def forget(self, request: str) -> None:
        self._own.pop(request, None)

    def _derive(self) -> None:
        self._version += 1
        self._since_derived = 0
        before, self._odds = UNSEEN_ODDS, []
        leaned = NEIGHBOUR_WEIGHT * self._traffic.weight
        for stood, looked in zip(self._traffic.stood, self._traffic.looked, strict=True):
            before = (stood + leaned * before) / (looked + leaned)
            self._odds.append(before)
        self._unseen = tuple(accumulate(self._odds, mul))


def _odds_of(curve: AcceptanceCurve | None, most: int) -> list[float]:
    """Odds by position from a curve of tokens; positions it does not know are like its last."""
    if curve is None:
        return []
    survival = [curve.tokens[k] - curve.tokens[k - 1] for k in range(1, curve.most + 1)]
    odds, before = [], 1.0
    for left in survival[:most]:
        odds.append(min(max(left / before, 0.0), 1.0) if before > 0 else 0.0)
        before = left
    return odds + odds[-1:] * (most - len(odds))


_TRAFFIC_GROWTH = 2 ** (1 / TRAFFIC_HALF_LIFE)
_REQUEST_GROWTH = 2 ** (1 / REQUEST_HALF_LIFE)
_IDLE_GROWTH = 2 ** (1 / IDLE_HALF_LIFE)
