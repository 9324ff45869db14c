"""Predicted speed-ups, the table of draft lengths, and the file that holds them."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from leadout.control.acceptance_model import AcceptanceCurve
from leadout.control.cost_model import StepCosts
from leadout.control.tuned_file import TunedFileError, choose_table, gain, read_tuned, write_tuned
from leadout.stats import Interval
from support.tuned_files import a_tuning, near, speedups_of

# A step: 10 ms, 1 ms a request, 1 ms a verified draft; drafting: 2 ms and 0.5 ms a draft token.
BATCH_SIZES, MAX_DRAFTS = (1, 4, 16), 7
COSTS = StepCosts(
    verify={
        b: {v: 0.010 + 0.001 * b + 0.001 * b * v for v in (0, 3, MAX_DRAFTS)} for b in BATCH_SIZES
    },
    draft={b: {k: 0.002 + 0.0005 * b * k for k in (0, 3, MAX_DRAFTS)} for b in BATCH_SIZES},
)
GOOD, USELESS = [0.9, 0.85, 0.8, 0.8], [0.02, 0.0, 0.0, 0.0]
PROBABILITIES = [0.9, 0.8, 0.7]


def test_gain_is_tokens_over_time_relative_to_a_bare_step() -> None:
    curve = AcceptanceCurve.from_probabilities([0.8, 0.7, 0.6])
    found = gain(COSTS, curve, batch=4, k=3)
    step = COSTS.verify_seconds(4, 12) + COSTS.draft_seconds(4, 3)
    assert found.tokens_per_second == pytest.approx(4 * curve.tokens[3] / step)
    assert found.speedup == pytest.approx(curve.tokens[3] / step * COSTS.bare_seconds(4))
    assert found.perfect == pytest.approx(4 / step * COSTS.bare_seconds(4))
    assert found.perfect > found.speedup
    assert found.free > found.speedup


def test_drafter_that_is_never_right_only_costs() -> None:
    useless = AcceptanceCurve.from_probabilities([0.0] * MAX_DRAFTS)
    assert all(
        gain(COSTS, useless, batch, k).speedup < 1
        for batch in BATCH_SIZES
        for k in range(MAX_DRAFTS)
    )


def test_good_drafter_drafts_more_for_few_requests_and_less_for_many() -> None:
    table = choose_table(speedups_of(GOOD), 16)
    lengths = [choice.k for choice in table.choices]
    assert lengths[0] >= 3
    assert lengths == sorted(lengths, reverse=True)
    ranges = table.ranges()
    assert (ranges[0][0], ranges[-1][1]) == (1, 16)
    assert all(after[0] == before[1] + 1 for before, after in pairwise(ranges))


def test_useless_drafter_is_not_served_at_all() -> None:
    table = choose_table(speedups_of(USELESS), 16)
    assert table.ranges() == [(1, 16, 0)]
    assert table.loses_above == 0
    assert table.break_even is None
    assert table.choices[0].speedup.value == 1  # a bare server has no drafter's context to keep up


def test_gain_that_is_not_significant_does_not_count() -> None:
    significant = {1: {0: near(0.9), 2: Interval(value=1.1, low=1.01, high=1.2)}}
    noise = {1: {0: near(0.9), 2: Interval(value=1.1, low=0.99, high=1.2)}}
    assert choose_table(significant, 1).ranges() == [(1, 1, 2)]
    assert choose_table(noise, 1).ranges() == [(1, 1, 0)]


def test_smallest_of_nearly_equal_lengths_is_chosen() -> None:
    by_k = {0: near(0.9), 1: near(1.3), 2: near(1.5), 3: near(1.507), 4: near(1.509)}
    assert choose_table({1: by_k}, 1).ranges() == [(1, 1, 2)]


def test_batch_sizes_without_a_gain_still_pay_for_the_drafters_context() -> None:
    table = choose_table(speedups_of([0.7], per_draft=0.1, drafting=0.2), 16)
    assert table.choices[0].gains
    largest = table.choices[-1]
    assert largest.k == 0
    assert largest.speedup.value == pytest.approx(1 / 1.2)
    assert table.loses_above == 4


def test_length_with_the_smallest_loss_is_chosen_where_all_lose() -> None:
    # On runners that always draft the whole block, K = 0 saves nothing.
    losing = {0: near(0.7), 1: near(0.95), 2: near(0.9)}
    gaining = {0: near(0.7), 1: near(1.4), 2: near(1.5)}
    table = choose_table({1: gaining, 2: losing}, 2)
    assert table.ranges() == [(1, 1, 2), (2, 2, 1)]
    assert table.loses_above == 1
    # Only if the difference is significant.
    noise = losing | {1: Interval(value=0.75, low=0.65, high=0.85), 2: near(0.6)}
    assert choose_table({1: gaining, 2: noise}, 2).ranges() == [(1, 1, 2), (2, 2, 0)]


def test_break_even_is_where_the_best_speedup_falls_below_one() -> None:
    falling = {
        1: {0: near(0.9), 1: near(1.5)},
        4: {0: near(0.9), 1: near(1.2)},
        8: {0: near(0.9), 1: near(0.8)},
    }
    table = choose_table(falling, 8)
    assert table.break_even == pytest.approx(6.0)
    assert table.loses_above == 5  # at 6 there is no gain
    assert table.ranges() == [(1, 6, 1), (7, 8, 0)]  # at 6, K = 0 would lose more


def test_gain_at_every_batch_size_has_no_break_even() -> None:
    table = choose_table({1: {0: near(0.9), 1: near(1.5)}, 4: {0: near(0.9), 1: near(1.2)}}, 4)
    assert table.loses_above is None
    assert table.break_even is None
    assert table.ranges() == [(1, 4, 1)]


def test_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    tuned, path = a_tuning(PROBABILITIES), tmp_path / "tuned.json"
    write_tuned(tuned, path)
    assert read_tuned(path) == tuned
    assert [file.name for file in tmp_path.iterdir()] == ["tuned.json"]


def test_curves_of_a_file_predict_its_speedups() -> None:
    tuned = a_tuning(PROBABILITIES)
    for batch, by_k in tuned.speedup.items():
        for k, found in by_k.items():
            predicted = gain(tuned.costs(), tuned.curve(), batch, k)
            assert predicted.speedup == pytest.approx(found.value)


def test_break_even_length_is_where_the_speedup_is_one() -> None:
    tuned = a_tuning(PROBABILITIES)
    for batch in (1, 4, 16):
        predicted = gain(tuned.costs(), tuned.curve(), batch, 2)
        tokens = tuned.curve().tokens[2]
        assert tuned.break_even_length(batch, 2) == pytest.approx(tokens / predicted.speedup)


def test_losing_batch_sizes_are_named_with_the_k_that_loses_least() -> None:
    assert a_tuning([0.99, 0.99], per_draft=0.001).losing_at(16) == []
    useless = a_tuning([0.02, 0.0])
    assert [loss.batch for loss in useless.losing_at(16)] == [1, 2, 4, 8, 16]
    assert [loss.batch for loss in useless.losing_at(4)] == [1, 2, 4]
    first = useless.losing_at(16)[0]
    assert (first.k, first.tokens.value) == (1, pytest.approx(1.02))
    assert first.break_even == pytest.approx(1.15)  # one verified draft, and drafting
    partly = a_tuning([0.5, 0.2]).losing_at(16)
    assert partly
    assert partly[0].batch > 1
    assert partly[0].tokens.high < partly[0].break_even


def test_acceptance_curve_is_linear_between_the_measured_lengths() -> None:
    tuned = a_tuning(PROBABILITIES)
    tokens = {k: found for k, found in tuned.acceptance.tokens.items() if k != 2}
    sparse = tuned.model_copy(
        update={"acceptance": tuned.acceptance.model_copy(update={"tokens": tokens})}
    )
    curve = sparse.curve()
    assert len(curve.tokens) == 4
    assert curve.tokens[2] == pytest.approx((curve.tokens[1] + curve.tokens[3]) / 2)


def add_unknown_key(content: dict[str, Any]) -> None:
    content["surprise"] = 1


def leave_a_gap(content: dict[str, Any]) -> None:
    content["table"] = [[1, 3, 2], [5, 16, 0]]


def draft_beyond_the_block(content: dict[str, Any]) -> None:
    content["table"] = [[1, 16, 4]]


def end_early(content: dict[str, Any]) -> None:
    content["table"] = [[1, 8, 1]]


def another_format(content: dict[str, Any]) -> None:
    content["format"] = 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_unknown_key, "surprise"),
        (leave_a_gap, "begin at batch size 4"),
        (draft_beyond_the_block, "0 <= K < 4"),
        (end_early, "ends at batch size 8, expected 16"),
        (another_format, "format"),
    ],
)
def test_changed_file_is_rejected(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    path = tmp_path / "tuned.json"
    content = json.loads(a_tuning(PROBABILITIES).model_dump_json())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(TunedFileError, match=message) as rejection:
        read_tuned(path)
    assert "tune again" in str(rejection.value)


def test_error_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TunedFileError, match=r"nowhere\.json does not exist"):
        read_tuned(tmp_path / "nowhere.json")
