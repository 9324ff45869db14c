"""Which rounds are measured."""

from collections import Counter
from pathlib import Path

from leadout.tune.settings import batch_sizes, draft_counts, make_plan, make_rounds, product_seconds


def test_batch_sizes_double_up_to_the_largest() -> None:
    assert batch_sizes(16) == [1, 2, 4, 8, 16]
    assert batch_sizes(12) == [1, 2, 4, 8, 12]
    assert batch_sizes(1) == [1]


def test_a_long_block_is_measured_at_fewer_lengths() -> None:
    assert draft_counts(5) == [0, 1, 2, 3, 4, 5]
    assert draft_counts(7) == [0, 1, 2, 3, 5, 7]
    assert draft_counts(15) == [0, 1, 2, 3, 5, 7, 11, 15]


def test_every_length_answers_the_same_prompts_at_every_batch_size() -> None:
    rounds = make_rounds(8, 3, prompts=30)
    assert Counter((each.batch, each.k) for each in rounds) == {
        (batch, k): 2 if batch <= 4 else 1 for batch in (1, 2, 4, 8) for k in range(4)
    }
    assert all(len(each.prompts) == each.batch for each in rounds)
    at_eight = {tuple(each.prompts) for each in rounds if each.batch == 8}
    assert len(at_eight) == 1
    at_one = {tuple(each.prompts) for each in rounds if each.batch == 1}
    assert len(at_one) == 2  # the second time another


def test_few_requests_at_a_time_are_asked_for_more_often() -> None:
    rounds = make_rounds(2, 1, prompts=30)
    assert sum(each.batch for each in rounds if each.k == 1) >= 20
    assert len({tuple(each.prompts) for each in rounds if each.batch == 2}) == 9


def test_few_prompts_are_asked_again() -> None:
    (wide,) = {tuple(each.prompts) for each in make_rounds(8, 1, prompts=3) if each.batch == 8}
    assert set(wide) == {0, 1, 2}


def test_the_plan_grows_with_what_is_measured(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(16 << 20))
    slow_machine = lambda rows: 1.0 + 0.01 * rows  # noqa: E731
    small = make_plan(tmp_path, make_rounds(4, 1, 30), 30, slow_machine)
    large = make_plan(tmp_path, make_rounds(16, 7, 30), 30, slow_machine)
    assert 1 < small.minutes < large.minutes / 3
    assert product_seconds(1) > 0
    assert "batch sizes 1, 2, 4, 8, 16 with K 0, 1, 2, 3, 5, 7" in large.text()
