"""The optimisation behind every decision: which K, and which drafts, maximise tokens per second.

A step with b requests that drafts K tokens for each and verifies v_i drafts of request i yields

    tokens / seconds = (b + Σ_i Σ_{j ≤ v_i} S_i(j)) / (verify(b, Σ_i v_i) + draft(b, K))

where S_i(j) is the probability that the first j drafts of request i are all accepted (its survival
function). Every verified draft adds its own S_i(j), independently of the others, and S_i falls with
j. So the best n drafts of a batch are simply those with the n highest survival probabilities, and
they always are the first drafts of their requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import truediv

from leadout.control.cost_model import StepCostTable

Survival = Sequence[float]  # [j]: probability that drafts 1 to j + 1 are all accepted


def throughput_by_k(
    survivals: Sequence[Survival], limits: Sequence[int], costs: StepCostTable
) -> list[float]:
    """The highest tokens per second for each K, if every step drafts K and verifies the best.

    `limits[i]` is the maximum number of drafts of request i.
    """
    found = [costs.batch_size / costs.baseline]
    candidates: list[float] = []
    for k in range(1, len(costs.draft)):
        candidates += [
            survival[k - 1] for survival, limit in zip(survivals, limits, strict=True) if limit >= k
        ]
        candidates.sort(reverse=True)
        tokens = list(accumulate(candidates, initial=float(costs.batch_size)))
        found.append(max(map(truediv, tokens[:: costs.stride], costs.step[k])))
    return found


def min_worthwhile_survival(
    survivals: Sequence[Survival], limits: Sequence[int], costs: StepCostTable, rate: float
) -> float:
    """The survival probability from which on a draft is worth verifying.

    Time is valued at `rate`, the tokens per second of the whole: maximises
    Σ S_i(j) - rate * verify(n) over the number n of verified drafts.
    """
    candidates: list[float] = []
    for survival, limit in zip(survivals, limits, strict=True):
        candidates += survival[:limit]
    candidates.sort(reverse=True)
    tokens = list(accumulate(candidates, initial=0.0))[:: costs.stride]
    # The table is shorter than the candidates only if a request has more drafts than can be made.
    values = [gained - rate * spent for gained, spent in zip(tokens, costs.verify, strict=False)]
    best = values.index(max(values))
    # The marginal cost of one more draft: drafts that are not among these candidates may pay it.
    next_ = min(best, len(costs.verify) - 2)
    marginal = rate * (costs.verify[next_ + 1] - costs.verify[next_]) / costs.stride
    return min(marginal, candidates[best * costs.stride - 1]) if best else marginal


def drafts_to_verify(
    survivals: Sequence[Survival], limits: Sequence[int], min_survival: float
) -> list[int]:
    """For each request, the number of leading drafts with at least `min_survival`."""
    found = []
    for survival, limit in zip(survivals, limits, strict=True):
        count = 0
        while count < limit and survival[count] >= min_survival:
            count += 1
        found.append(count)
    return found
