"""Whether a drafter that was just swapped in accepts as much as expected: a sequential test.

The expectation is the acceptance length of requests, measured before the drafter was served. It is
compared with whole answers that began after the swap. The unit is the request: steps within one
answer are too much alike to count as independent.

A few clients must not decide for all. Anyone can send prompts that no drafter predicts, so

- a request counts with at most `MAX_STEPS` steps, however long its answer is, and a prompt with at
  most `MAX_REQUESTS_PER_PROMPT` requests;
- requests whose acceptance is below `HOSTILE_LENGTH` of the expected one are left out as far as
  there are more of them than expected, lowest first, at most `HOSTILE_SHARE` of all requests, or
  `HOSTILE_BURST` while there are few. So many requests cannot do more harm than is tolerated:
  those that are low enough are left out, and the others are not low enough;
- the shortfall must also be there if every client counts with at most `MAX_CLIENT_SHARE` of the
  requests, where clients are known. It must be there in both counts: with a limit for each client
  alone, somebody with many addresses would count for more than the clients that send most requests.

Traffic changes, too. If the version before accepts less than it did when the expectation was
measured, on this server until the swap or on others at the same time, less is expected of the new
version by the same factor. A version that is significantly better than the one before it is kept
even if less was accepted than expected: going back would make it worse.

Checks are few, each after twice as many requests as the one before, however often the numbers are
read. Even for a drafter at the very edge of what is tolerated, the probability of a false alarm at
any of them is below 1%: `STANDARD_ERRORS` is larger than a normal distribution would require,
because samples of some dozens of requests can be skewed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from math import sqrt
from operator import add
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

STANDARD_ERRORS = 4.0
MAX_CHECKS = 8
FIRST_CHECK = 60  # requests
HOSTILE_SHARE = 0.125  # of the requests; a little more than the tenth that must do no harm
HOSTILE_BURST = 30  # requests, all of them in a row
HOSTILE_LENGTH = 0.6  # of the expected acceptance length
MAX_STEPS = 32  # of one request
MAX_REQUESTS_PER_PROMPT = 4
MAX_CLIENT_SHARE = 1 / 16  # of the requests
MIN_REQUESTS_PER_CLIENT = 4  # that count in any case
# If the limit for clients leaves less than this share of the requests, there are too few clients
# for a limit, such as one gateway for all users.
MIN_COUNTED_SHARE = 0.25
MAX_REMEMBERED = 10_000  # prompts, and clients; the comparison is over long before
BINS_PER_TOKEN = 16  # of acceptance length; requests in one bin are left out together
MAX_BIN = 2048  # far above any block, so that the tally stays small whatever is counted
# Traffic has changed, or a version is better than the one before it, from so many on.
CONTROL_STANDARD_ERRORS = 2.0
BETTER = 0.05  # share by which a version must be better to be kept below its expectation


def hostile_share(requests: int) -> float:
    """The share of so many requests that must do no harm."""
    return max(HOSTILE_SHARE, min(HOSTILE_BURST / max(requests, 1), 0.5))


def tolerance(requests: int) -> float:
    """The share by which the acceptance of so many requests may stay below the expectation.

    It is the harm that hostile requests can do which are just not low enough to be left out.
    """
    return (1 - HOSTILE_LENGTH) * hostile_share(requests)


class Sums(NamedTuple):
    """Sums over requests, with the target steps with drafts and their tokens of each."""

    requests: float = 0
    steps: float = 0
    tokens: float = 0
    steps_squared: float = 0
    tokens_squared: float = 0
    steps_by_tokens: float = 0

    @classmethod
    def of_request(cls, steps: float, tokens: float) -> Sums:
        return cls(1, steps, tokens, steps * steps, tokens * tokens, steps * tokens)

    def plus(self, other: Sums) -> Sums:
        return Sums(*map(add, self, other))

    def times(self, share: float) -> Sums:
        return Sums(*(share * value for value in self))


@dataclass(frozen=True)
class Estimate:
    """An acceptance length with its standard error."""

    length: float
    error: float


class Tally(BaseModel):
    """Requests by acceptance length, so that the lowest can be left out.

    Sums, and therefore of bounded size: tallies of several engines, of several servers or from
    before a restart can be added.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    requests: int = 0
    steps: int = 0
    tokens: int = 0
    bins: dict[int, Sums] = Field(default_factory=dict)  # steps of a request at most MAX_STEPS

    def with_request(self, steps: int, tokens: int) -> Tally:
        counted = min(steps, MAX_STEPS)
        one = Sums.of_request(counted, tokens * counted / steps)
        place = min(int(BINS_PER_TOKEN * tokens / steps), MAX_BIN)
        return Tally.model_construct(
            requests=self.requests + 1,
            steps=self.steps + steps,
            tokens=self.tokens + tokens,
            bins={**self.bins, place: self.bins.get(place, Sums()).plus(one)},
        )

    def __add__(self, other: Tally) -> Tally:
        bins = dict(self.bins)
        for place, sums in other.bins.items():
            bins[place] = bins.get(place, Sums()).plus(sums)
        return Tally.model_construct(
            requests=self.requests + other.requests,
            steps=self.steps + other.steps,
            tokens=self.tokens + other.tokens,
            bins=bins,
        )

    @property
    def acceptance_length(self) -> float | None:
        """Over all steps of all requests."""
        return self.tokens / self.steps if self.steps else None

    def low_requests(self, expected: float) -> float:
        """How many requests are below `HOSTILE_LENGTH` of an acceptance length."""
        below = BINS_PER_TOKEN * HOSTILE_LENGTH * expected
        return sum(sums.requests for place, sums in self.bins.items() if place + 1 <= below)

    def estimate(self, expected: Acceptance | None = None) -> Estimate | None:
        """Acceptance length; None with too few requests.

        With an expectation, low requests are left out as far as there are more than expected.

        The length is a ratio of two sums over requests, so its error follows from the delta method.
        Requests that are left out count in the error as if they were at the cut (Winsorized).
        """
        if self.requests < 2 or not self.bins:
            return None
        excess = 0.0  # how many requests are still to be left out
        if expected is not None:
            unexpected = self.low_requests(expected.low) - expected.low_share * self.requests
            excess = max(min(unexpected, hostile_share(self.requests) * self.requests), 0.0)
        kept, cut = Sums(), 0.0
        for place in sorted(self.bins):
            sums = self.bins[place]
            dropped = min(excess, sums.requests)
            excess -= dropped
            if dropped < sums.requests:
                cut = cut or sums.tokens / sums.steps
                kept = kept.plus(sums.times(1 - dropped / sums.requests))
        ratio = kept.tokens / kept.steps
        squared = (
            kept.tokens_squared
            - 2 * ratio * kept.steps_by_tokens
            + ratio * ratio * kept.steps_squared
        )
        steps = kept.steps / kept.requests
        squared += (self.requests - kept.requests) * ((ratio - cut) * steps) ** 2
        correction = self.requests / (self.requests - 1)
        return Estimate(ratio, sqrt(max(squared, 0.0) * correction) / kept.steps)


class RequestLimits:
    """Which requests count: those of one prompt, and those of one client, up to a limit."""

    def __init__(self) -> None:
        self._by_prompt: Counter[Hashable] = Counter()
        self._by_client: Counter[Hashable] = Counter()
        self._counted = 0

    def admit(self, prompt: Hashable, client: Hashable | None) -> tuple[bool, bool]:
        """Whether a finished request counts, and whether it does with the limit for clients.

        `client` is None if it is not known who has sent the request.
        """
        if prompt in self._by_prompt or len(self._by_prompt) < MAX_REMEMBERED:
            self._by_prompt[prompt] += 1
        if self._by_prompt[prompt] > MAX_REQUESTS_PER_PROMPT:
            return False, False
        self._counted += 1
        if client is None or (
            client not in self._by_client and len(self._by_client) >= MAX_REMEMBERED
        ):
            return True, False
        limit = max(MAX_CLIENT_SHARE * self._counted, MIN_REQUESTS_PER_CLIENT)
        is_within = self._by_client[client] < limit
        self._by_client[client] += is_within
        return True, is_within


@dataclass(frozen=True)
class Acceptance:
    """The acceptance length of requests, measured before a version was served."""

    length: float
    low: float  # lower end of the 95% confidence interval
    low_share: float = 0.0  # at least so many requests are below `HOSTILE_LENGTH` of `low`

    @classmethod
    def of(cls, tally: Tally) -> Acceptance | None:
        found = tally.estimate()
        if found is None:
            return None
        low = max(found.length - 1.96 * found.error, 1.0)
        share = tally.low_requests(low) / tally.requests
        error = sqrt(share * (1 - share) / tally.requests)
        return cls(length=found.length, low=low, low_share=max(share - 1.96 * error, 0.0))


@dataclass(frozen=True)
class Expectation:
    """What is expected of a version, and what was measured of the one before on the same text."""

    version: Acceptance
    before: Acceptance | None = None


@dataclass(frozen=True)
class Shortfall:
    """Served traffic accepted significantly less than expected.

    The field names are keys of the registry's ledger.
    """

    acceptance_length: float  # without the lowest requests
    high: float  # upper confidence bound
    least: float  # what is tolerated
    requests: int

    def __str__(self) -> str:
        return (
            f"acceptance length {self.acceptance_length:.2f} (at most {self.high:.2f}) over "
            f"{self.requests} requests, expected at least {self.least:.2f}"
        )


class ShortfallTest:
    """Compares the tally of requests since a swap with the expectation; reports at most once."""

    def __init__(self, expected: Expectation, before: Tally | None = None, checks: int = 0) -> None:
        """`before`: requests of the version before, on the same server until the swap.

        `checks`: how many were made before a restart.
        """
        self._expected = expected
        self.checks = checks
        self.before = before if is_enough(before) else None

    @property
    def is_finished(self) -> bool:
        return self.checks >= MAX_CHECKS

    @property
    def needs_control(self) -> bool:
        """Whether requests of the version before, at the same time, would be of use."""
        return self._expected.before is not None

    def is_due(self, tally: Tally) -> bool:
        return not self.is_finished and _checks_at(tally.requests) > self.checks

    def check(
        self, tally: Tally, by_client: Tally | None = None, control: Tally | None = None
    ) -> Shortfall | None:
        """Does nothing until the requests of the next check are complete.

        `by_client`: with the limit for clients. `control`: requests of the version before on other
        servers, at the same time.
        """
        if not self.is_due(tally):
            return None
        self.checks = _checks_at(tally.requests)
        counts = [tally]
        if by_client is not None and by_client.requests >= MIN_COUNTED_SHARE * tally.requests:
            counts.append(by_client)
        change = self._change_of_traffic(control)
        control = control if is_enough(control) else self.before
        found = [self._shortfall(each, control, change) for each in counts]
        return None if None in found else found[0]

    def _shortfall(self, tally: Tally, control: Tally | None, change: float) -> Shortfall | None:
        expected = self._expected.version
        found = tally.estimate(expected)
        if found is None:
            return None
        # Every target step yields one token, whatever the drafter does.
        least = max(expected.low * (1 - tolerance(tally.requests)) * change, 1.0)
        high = found.length + STANDARD_ERRORS * found.error
        if high >= least or self._is_better(found, control):
            return None
        return Shortfall(found.length, high, least, tally.requests)

    def _change_of_traffic(self, control: Tally | None) -> float:
        """At most 1: what the version before accepts now, relative to what it did before.

        Requests at the same time become more and more, so the lower bound of theirs is taken: no
        version is given up while it is open whether traffic has changed. Those before the swap
        stay as few as they are, and must show a change.
        """
        before = self._expected.before
        is_now = is_enough(control)
        tally = control if is_now else self.before
        found = None if tally is None or before is None else tally.estimate(before)
        if found is None or before is None:
            return 1.0
        errors = -CONTROL_STANDARD_ERRORS if is_now else CONTROL_STANDARD_ERRORS
        # Both lower ends: they are of the same requests, and the same share too low or too high.
        return min((found.length + errors * found.error) / before.low, 1.0)

    def _is_better(self, found: Estimate, control: Tally | None) -> bool:
        before = None if control is None else control.estimate(self._expected.before)
        if before is None:
            return False
        error = sqrt(found.error**2 + ((1 + BETTER) * before.error) ** 2)
        gain = found.length - (1 + BETTER) * before.length
        return gain > CONTROL_STANDARD_ERRORS * error


def _checks_at(requests: int) -> int:
    return (requests // FIRST_CHECK).bit_length()  # 60, 120, 240, ... requests


def is_enough(tally: Tally | None) -> bool:
    """Whether there are enough requests to compare others with."""
    return tally is not None and tally.requests >= FIRST_CHECK
