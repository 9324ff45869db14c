"""When to try drafts although they do not pay, and when to pause although they do.

While drafts are off nothing is learnt of them, so a probe drafts and verifies a little every now
and then. Probes may take a fixed share of the time, and half of it once many in a row have failed;
they never come later than `NOTICE_STEPS` after the last. A promising one is followed by another at
once, until what is believed has changed or the promise is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leadout.control.split import Prices, rates

PROBE_SHARE = 0.02  # of the time
PROBE_DRAFTING, PROBE_VERIFYING = 0.2, 0.08  # of a bare step, at most, beyond the least probe
LEAST_PROBE = 2  # drafts of a request
LEAST_INTERVAL = 8
NOTICE_STEPS = 200
PATIENCE_AFTER, PATIENCE = 20, 2  # failures in a row, and how many times rarer probes are then
CAUTION = 2  # refusals added to what a row of probes has shown
PAUSE_STEPS = 256  # between two steps that show what drafting costs


@dataclass(frozen=True, slots=True)
class Probe:
    """How much is drafted for each request and verified in all, and what that costs."""

    k: int
    drafts: int
    bare_steps: float

    @classmethod
    def affordable(cls, prices: Prices, most: int) -> Probe:
        bare = prices.bare
        k = min(LEAST_PROBE, most)
        while k < most and prices.draft[k + 1] - prices.draft[0] <= PROBE_DRAFTING * bare:
            k += 1
        place = max(1, k // prices.stride)
        while (
            place + 1 < len(prices.verify)
            and (place + 1) * prices.stride <= k * prices.batch
            and prices.verify[place + 1] - prices.verify[0] <= PROBE_VERIFYING * bare
        ):
            place += 1
        extra = prices.draft[k] - prices.draft[0] + prices.verify[place] - prices.verify[0]
        return cls(k, max(k, place * prices.stride), extra / bare)


class Prober:
    """Places probes while drafts are off."""

    def __init__(self) -> None:
        self._since = 0
        self._failures = 0
        self._stood = self._looked = 0
        self._at_once = False

    def due(self, probe: Probe) -> bool:
        """Called once for each step without drafts."""
        self._since += 1
        return self._at_once or self._since >= self.interval(probe)

    def interval(self, probe: Probe) -> int:
        wanted = probe.bare_steps / PROBE_SHARE
        if self._failures >= PATIENCE_AFTER:
            wanted *= PATIENCE
        return int(min(max(wanted, LEAST_INTERVAL), NOTICE_STEPS))

    def sent(self) -> None:
        self._since = 0
        self._at_once = False

    def came_back(self, stood: int, looked: int, prices: Prices) -> bool:
        """Whether a probe promises a gain: by what this row of probes alone has shown."""
        self._stood += stood
        self._looked += looked
        odds = self._stood / (self._looked + CAUTION)
        survival = [odds ** (k + 1) for k in range(len(prices.draft) - 1)]
        batch = prices.batch
        best = max(rates([survival] * batch, [len(survival)] * batch, prices))
        self._at_once = best > batch / prices.bare
        if self._at_once:
            self._failures = 0
        else:
            self._failures += 1
            self._stood = self._looked = 0
        return self._at_once

    def drafts_are_on(self) -> None:
        self._since = self._stood = self._looked = 0
        self._failures = 0
        self._at_once = False


class Survey:
    """Steps taken only to learn their price: without a price list, and a rare pause with one."""

    def __init__(self, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._seen: dict[tuple[int, bool], int] = {}
        self._since_bare = 0

    def wanted(self, batch: int, most: int) -> int | None:
        """The k of a step that should be measured now; None: no wish."""
        if self._is_needed:
            for full in (False, True):
                if self._seen.get((batch.bit_length(), full), 0) < 2:
                    return most if full else 0
        return 0 if self._since_bare >= PAUSE_STEPS else None

    def saw(self, batch: int, drafts: int, k: int) -> None:
        # Without drafting or without drafts: either tells what the other part of a step costs.
        self._since_bare = self._since_bare + 1 if drafts and k else 0
        if not k and not drafts:
            self._count(batch, False)
        elif k and drafts:
            self._count(batch, True)

    def _count(self, batch: int, full: bool) -> None:
        place = (batch.bit_length(), full)
        self._seen[place] = self._seen.get(place, 0) + 1


def spread_over(drafts: int, limits: Sequence[int], looks: Sequence[float]) -> list[int]:
    """`drafts` in all, as whole as possible, to the requests that were looked at least."""
    given = [0] * len(limits)
    for place in sorted(range(len(limits)), key=looks.__getitem__):
        given[place] = min(limits[place], drafts)
        drafts -= given[place]
    return given
