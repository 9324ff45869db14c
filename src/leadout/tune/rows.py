"""The numbers of a tuning at each measured batch size, for terminal and page."""

from __future__ import annotations

from dataclasses import dataclass

from leadout.control.gain import Gain, gain
from leadout.control.interval import Interval
from leadout.control.tuned import Tuned


@dataclass(frozen=True, slots=True)
class Row:
    batch: int
    bare_seconds: Interval
    k: int  # of the table
    speedup: Interval  # of the table
    gain: Gain  # of the best K, also where the table has none
    best_speedup: Interval


def rows(tuned: Tuned) -> list[Row]:
    costs, curve = tuned.costs(), tuned.curve()
    found = []
    for batch in sorted(tuned.verify):
        by_k = tuned.speedup[batch]
        k = tuned.k_at(batch)
        best = k or max((each for each in by_k if each), key=lambda each: by_k[each].value)
        found.append(
            Row(
                batch=batch,
                bare_seconds=tuned.verify[batch][0],
                k=k,
                speedup=_of_table(tuned, batch, k),
                gain=gain(costs, curve, batch, best),
                best_speedup=by_k[best],
            )
        )
    return found


def tokens_per_second(tuned: Tuned, batch: int, k: int) -> Interval:
    """Predicted for a measured batch size and K; its spread is that of the speed-up."""
    bare = batch / tuned.verify[batch][0].value
    return tuned.speedup[batch][k].times(bare)


def _of_table(tuned: Tuned, batch: int, k: int) -> Interval:
    if tuned.most_drafts == 0:  # served bare
        return Interval(value=1.0, low=1.0, high=1.0)
    return tuned.speedup[batch][k]
