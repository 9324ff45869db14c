"""How many tokens to draft at each batch size, from measured speed-ups over a bare engine.

A server with a drafter pays for it also where it drafts nothing: the drafter's context is kept up.
So there are two questions. Is there a batch size at which drafting surely gains? If not, the best
server is a bare one. If so, the others get what loses least in a server that has the drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from leadout.control.costs import Line
from leadout.control.interval import Interval

NEARLY_EQUAL = 0.01  # of the speed-up: what repeated measurements differ by anyway

Speedups = Mapping[int, Mapping[int, Interval]]  # by batch size and K; K = 0 is the keeping up
Range = tuple[int, int, int]  # first and last batch size, K


@dataclass(frozen=True, slots=True)
class Choice:
    """What a server does at one batch size, and its speed over that of a bare server."""

    batch: int
    k: int
    speedup: Interval

    @property
    def gains(self) -> bool:
        """Whether drafting surely pays: the whole interval lies above 1."""
        return self.k > 0 and self.speedup.low > 1


@dataclass(frozen=True, slots=True)
class Table:
    choices: tuple[Choice, ...]  # of batch sizes 1, 2, ...
    break_even: float | None  # batch size at which the best K no longer gains; None: not within

    @property
    def is_bare(self) -> bool:
        """Nothing is ever drafted, so the drafter should not be there."""
        return all(choice.k == 0 for choice in self.choices)

    @property
    def loses_above(self) -> int | None:
        """The last batch size that surely gains; None if it is the last one measured."""
        gaining = [choice.batch for choice in self.choices if choice.gains]
        last = max(gaining, default=0)
        return None if last == len(self.choices) else last

    def ranges(self) -> list[Range]:
        found = []
        for k, run in groupby(self.choices, key=lambda choice: choice.k):
            batches = [choice.batch for choice in run]
            found.append((batches[0], batches[-1], k))
        return found


def choose_table(measured: Speedups, max_batch: int) -> Table:
    """The best table for batch sizes 1 to `max_batch`, which was measured or lies between."""
    speedups = speedups_at(measured, max_batch)
    gaining = {batch: _surely_gaining(by_k) for batch, by_k in speedups.items()}
    if not any(gaining.values()):
        nothing = Interval(value=1.0, low=1.0, high=1.0)
        choices = [Choice(batch, 0, nothing) for batch in speedups]
    else:
        choices = [
            Choice(batch, k, by_k[k])
            for batch, by_k in speedups.items()
            for k in (gaining[batch] or _least_losing(by_k),)
        ]
    return Table(tuple(choices), _break_even(speedups))


def speedups_at(measured: Speedups, max_batch: int) -> dict[int, dict[int, Interval]]:
    """At every batch size from 1 on."""
    return {batch: _between(measured, batch) for batch in range(1, max_batch + 1)}


def _between(measured: Speedups, batch: int) -> dict[int, Interval]:
    """Straight between the measured batch sizes."""
    drafted = sorted(set.intersection(*(set(by_k) for by_k in measured.values())))

    def at(k: int, edge: str) -> float:
        return Line.through({size: getattr(by_k[k], edge) for size, by_k in measured.items()})(
            batch
        )

    return {
        k: Interval(value=at(k, "value"), low=at(k, "low"), high=at(k, "high")) for k in drafted
    }


def _surely_gaining(speedups: Mapping[int, Interval]) -> int:
    """The best K whose gain is more than noise, the smallest of nearly equal ones; 0 for none."""
    return _best({k: s for k, s in speedups.items() if k > 0 and s.low > 1})


def _least_losing(speedups: Mapping[int, Interval]) -> int:
    """Draft nothing, unless some K is surely faster than keeping up the drafter for nothing."""
    idle = speedups[0].value
    return _best({k: s for k, s in speedups.items() if k > 0 and s.low > idle})


def _best(candidates: Mapping[int, Interval]) -> int:
    if not candidates:
        return 0
    best = max(speedup.value for speedup in candidates.values())
    return min(k for k, s in candidates.items() if s.value >= best * (1 - NEARLY_EQUAL))


def _break_even(speedups: Speedups) -> float | None:
    """Where the best speed-up falls through 1, for the last time."""
    best = {
        batch: max(speedup.value for k, speedup in by_k.items() if k > 0)
        for batch, by_k in speedups.items()
    }
    for batch in sorted(best, reverse=True)[1:]:
        above, below = best[batch], best[batch + 1]
        if above > 1:
            return batch + (above - 1) / (above - below) if below <= 1 else None
    return None
