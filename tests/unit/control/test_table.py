"""The draft lengths that are chosen, and those that must not be."""

from itertools import pairwise

import pytest

from leadout.control.tuned_file import choose_table
from leadout.stats import Interval
from support.tuned_files import near, speedups_of

GOOD, USELESS = [0.9, 0.85, 0.8, 0.8], [0.02, 0.0, 0.0, 0.0]


def test_a_good_drafter_drafts_more_for_few_requests_and_less_for_many() -> None:
    table = choose_table(speedups_of(GOOD), 16)
    drafted = [choice.k for choice in table.choices]
    assert drafted[0] >= 3
    assert drafted == sorted(drafted, reverse=True)
    ranges = table.ranges()
    assert (ranges[0][0], ranges[-1][1]) == (1, 16)
    assert all(after[0] == before[1] + 1 for before, after in pairwise(ranges))


def test_a_useless_drafter_is_not_served_at_all() -> None:
    table = choose_table(speedups_of(USELESS), 16)
    assert table.is_bare
    assert table.ranges() == [(1, 16, 0)]
    assert table.loses_above == 0
    assert table.break_even is None
    assert table.choices[0].speedup.value == 1  # a bare server keeps up no drafter


def test_a_gain_within_its_noise_does_not_count() -> None:
    sure = {1: {0: near(0.9), 2: Interval(value=1.1, low=1.01, high=1.2)}}
    unsure = {1: {0: near(0.9), 2: Interval(value=1.1, low=0.99, high=1.2)}}
    assert choose_table(sure, 1).ranges() == [(1, 1, 2)]
    assert choose_table(unsure, 1).ranges() == [(1, 1, 0)]


def test_of_nearly_equal_lengths_the_smaller_is_taken() -> None:
    by_k = {0: near(0.9), 1: near(1.3), 2: near(1.5), 3: near(1.507), 4: near(1.509)}
    assert choose_table({1: by_k}, 1).ranges() == [(1, 1, 2)]


def test_where_drafting_loses_a_mixed_table_pays_for_keeping_the_drafter_up() -> None:
    table = choose_table(speedups_of([0.7], per_draft=0.1, drafting=0.2), 16)
    assert table.choices[0].gains
    resting = table.choices[-1]
    assert resting.k == 0
    assert resting.speedup.value == pytest.approx(1 / 1.2)
    assert table.loses_above == 4


def test_where_all_lose_the_least_loss_is_taken() -> None:
    # On runners that draft the whole block anyway, drafting nothing saves nothing.
    dear_rest = {0: near(0.7), 1: near(0.95), 2: near(0.9)}
    gaining = {0: near(0.7), 1: near(1.4), 2: near(1.5)}
    table = choose_table({1: gaining, 2: dear_rest}, 2)
    assert table.ranges() == [(1, 1, 2), (2, 2, 1)]
    assert table.loses_above == 1
    # Only if that is more than noise.
    unsure = dear_rest | {1: Interval(value=0.75, low=0.65, high=0.85), 2: near(0.6)}
    assert choose_table({1: gaining, 2: unsure}, 2).ranges() == [(1, 1, 2), (2, 2, 0)]


def test_break_even_lies_where_the_best_length_falls_through_one() -> None:
    falling = {
        1: {0: near(0.9), 1: near(1.5)},
        4: {0: near(0.9), 1: near(1.2)},
        8: {0: near(0.9), 1: near(0.8)},
    }
    table = choose_table(falling, 8)
    assert table.break_even == pytest.approx(6.0)
    assert table.loses_above == 5  # at 6 the gain is none
    assert table.ranges() == [(1, 6, 1), (7, 8, 0)]  # at 6 resting would lose more


def test_a_gain_at_every_batch_size_loses_nowhere() -> None:
    table = choose_table({1: {0: near(0.9), 1: near(1.5)}, 4: {0: near(0.9), 1: near(1.2)}}, 4)
    assert table.loses_above is None
    assert table.break_even is None
    assert table.ranges() == [(1, 4, 1)]
