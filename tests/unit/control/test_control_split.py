"""The best drafts of a batch, against all ways to choose."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadout.control.cost_model import Prices, least_worth, rates, verified

MOST = 3


def priced(batch: int, per_draft: float, per_slot: float) -> Prices:
    return Prices.of(
        batch,
        1,
        [1.0 + per_draft * drafts for drafts in range(batch * MOST + 1)],
        [0.0] + [0.2 + per_slot * batch * k for k in range(1, MOST + 1)],
    )


odds = st.lists(st.floats(0.01, 0.99), min_size=MOST, max_size=MOST)


def survival_of(odds: list[float]) -> tuple[float, ...]:
    left, found = 1.0, []
    for chance in odds:
        left *= chance
        found.append(left)
    return tuple(found)


@given(st.lists(odds, min_size=1, max_size=3), st.floats(0.0, 0.5), st.floats(0.0, 0.1))
@settings(max_examples=60, deadline=None)
def test_no_other_choice_brings_more_tokens_per_second(
    all_odds: list[list[float]], per_draft: float, per_slot: float
) -> None:
    batch = len(all_odds)
    prices = priced(batch, per_draft, per_slot)
    survivals = [survival_of(mine) for mine in all_odds]
    by_k = rates(survivals, [MOST] * batch, prices)

    def rate(k: int, tried: tuple[int, ...]) -> float:
        gained = sum(sum(mine[:count]) for mine, count in zip(survivals, tried, strict=True))
        return (batch + gained) / prices.step[k][sum(tried)]

    for k in range(1, MOST + 1):
        best = max(rate(k, tried) for tried in product(range(k + 1), repeat=batch))
        assert by_k[k] == pytest.approx(best)
        least = least_worth(survivals, [k] * batch, prices, by_k[k])
        tried = tuple(verified(survivals, [k] * batch, least))
        assert rate(k, tried) == pytest.approx(best)


def test_requests_that_may_have_fewer_drafts_get_fewer() -> None:
    prices = priced(2, 0.0, 0.0)
    survivals = [(0.9, 0.8, 0.7)] * 2
    assert verified(survivals, [3, 1], 0.5) == [3, 1]
    capped = rates(survivals, [3, 0], prices)
    assert capped[3] < rates(survivals, [3, 3], prices)[3]
    assert rates(survivals, [0, 0], prices)[3] < capped[0]


def test_where_no_draft_is_worth_its_time_none_is_verified() -> None:
    prices = priced(1, 0.5, 0.0)
    survivals = [(0.1, 0.01, 0.001)]
    least = least_worth(survivals, [3], prices, rate=1.0)
    assert verified(survivals, [3], least) == [0]
