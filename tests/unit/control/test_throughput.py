"""The chosen drafts of a batch, compared with all possible choices."""

from itertools import accumulate, product
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadout.control.cost_model import StepCostTable
from leadout.control.throughput import (
    drafts_to_verify,
    min_worthwhile_survival,
    throughput_by_k,
)

MAX_DRAFTS = 3


def cost_table(batch_size: int, per_draft: float, per_draft_token: float) -> StepCostTable:
    return StepCostTable.build(
        batch_size,
        1,
        [1.0 + per_draft * drafts for drafts in range(batch_size * MAX_DRAFTS + 1)],
        [0.0] + [0.2 + per_draft_token * batch_size * k for k in range(1, MAX_DRAFTS + 1)],
    )


probabilities = st.lists(st.floats(0.01, 0.99), min_size=MAX_DRAFTS, max_size=MAX_DRAFTS)


@given(st.lists(probabilities, min_size=1, max_size=3), st.floats(0.0, 0.5), st.floats(0.0, 0.1))
@settings(max_examples=60, deadline=None)
def test_no_other_choice_has_a_higher_throughput(
    requests: list[list[float]], per_draft: float, per_draft_token: float
) -> None:
    batch_size = len(requests)
    costs = cost_table(batch_size, per_draft, per_draft_token)
    survivals = [tuple(accumulate(each, mul)) for each in requests]
    by_k = throughput_by_k(survivals, [MAX_DRAFTS] * batch_size, costs)

    def rate(k: int, verify: tuple[int, ...]) -> float:
        accepted = sum(sum(each[:count]) for each, count in zip(survivals, verify, strict=True))
        return (batch_size + accepted) / costs.step[k][sum(verify)]

    for k in range(1, MAX_DRAFTS + 1):
        best = max(rate(k, verify) for verify in product(range(k + 1), repeat=batch_size))
        assert by_k[k] == pytest.approx(best)
        limits = [k] * batch_size
        min_survival = min_worthwhile_survival(survivals, limits, costs, by_k[k])
        verify = tuple(drafts_to_verify(survivals, limits, min_survival))
        assert rate(k, verify) == pytest.approx(best)


def test_limits_of_requests_are_kept() -> None:
    costs = cost_table(2, 0.0, 0.0)
    survivals = [(0.9, 0.8, 0.7)] * 2
    assert drafts_to_verify(survivals, [3, 1], 0.5) == [3, 1]
    limited = throughput_by_k(survivals, [3, 0], costs)
    assert limited[3] < throughput_by_k(survivals, [3, 3], costs)[3]
    assert throughput_by_k(survivals, [0, 0], costs)[3] < limited[0]


def test_nothing_is_verified_where_no_draft_is_worth_its_time() -> None:
    costs = cost_table(1, 0.5, 0.0)
    survivals = [(0.1, 0.01, 0.001)]
    min_survival = min_worthwhile_survival(survivals, [3], costs, rate=1.0)
    assert drafts_to_verify(survivals, [3], min_survival) == [0]
