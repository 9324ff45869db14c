"""Which drafts are worth verifying: the likeliest first, as long as tokens per second rise.

One more verified draft of a request brings its survival in tokens, whatever the others do, and
survival only falls with the position. So the best n drafts of a batch are the n with the highest
survival, and the first j of each request among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import truediv


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of a step at one batch size.

    `verify[i]`: the target's pass with i x `stride` drafts in all; `draft[k]`: drafting k tokens
    for every request; `step[k][i]`: both together.
    """

    batch: int
    stride: int
    verify: tuple[float, ...]
    draft: tuple[float, ...]
    step: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, batch: int, stride: int, verify: Sequence[float], draft: Sequence[float]) -> Prices:
        step = tuple(tuple(pass_ + drafting for pass_ in verify) for drafting in draft)
        return cls(batch, stride, tuple(verify), tuple(draft), step)

    @property
    def bare(self) -> float:
        """A step that neither verifies nor drafts, but keeps the drafter's context."""
        return self.step[0][0]


Survival = Sequence[float]


def rates(survivals: Sequence[Survival], caps: Sequence[int], prices: Prices) -> list[float]:
    """Tokens per second by k, where k are drafted every step and the best of them verified."""
    found = [prices.batch / prices.bare]
    pool: list[float] = []
    for k in range(1, len(prices.draft)):
        pool += [survival[k - 1] for survival, cap in zip(survivals, caps, strict=True) if cap >= k]
        pool.sort(reverse=True)
        tokens = list(accumulate(pool, initial=float(prices.batch)))
        found.append(max(map(truediv, tokens[:: prices.stride], prices.step[k])))
    return found


def least_worth(
    survivals: Sequence[Survival], limits: Sequence[int], prices: Prices, rate: float
) -> float:
    """The survival from which on drafts are worth verifying.

    A draft is worth the time in which `rate`, the tokens per second of the whole, brings as much.
    """
    pool: list[float] = []
    for survival, limit in zip(survivals, limits, strict=True):
        pool += survival[:limit]
    pool.sort(reverse=True)
    tokens = list(accumulate(pool, initial=0.0))[:: prices.stride]
    # Fewer prices than drafts only where someone has more drafts than can be made.
    worth = [gained - rate * spent for gained, spent in zip(tokens, prices.verify, strict=False)]
    best = worth.index(max(worth))
    # What one more would have to bring; others than those looked at may do so.
    next_ = min(best, len(prices.verify) - 2)
    price = rate * (prices.verify[next_ + 1] - prices.verify[next_]) / prices.stride
    return min(price, pool[best * prices.stride - 1]) if best else price


def verified(survivals: Sequence[Survival], limits: Sequence[int], least: float) -> list[int]:
    """How many drafts each request verifies: those that survive well enough, up to its limit."""
    found = []
    for survival, limit in zip(survivals, limits, strict=True):
        reach = 0
        while reach < limit and survival[reach] >= least:
            reach += 1
        found.append(reach)
    return found
