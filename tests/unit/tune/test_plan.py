"""Which rounds are measured, and how long they are expected to take."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from leadout.control.policy import ladder_up_to
from leadout.tune.plan import (
    SHORT_TOKENS,
    ProductTimes,
    batch_sizes,
    draft_counts,
    make_plan,
    make_rounds,
    product_seconds,
    short_rounds,
)


def test_batch_sizes_double_up_to_the_largest() -> None:
    assert batch_sizes(16) == [1, 2, 4, 8, 16]
    assert batch_sizes(12) == [1, 2, 4, 8, 12]
    assert batch_sizes(1) == [1]


def test_a_long_block_is_measured_with_fewer_k() -> None:
    assert draft_counts(5, has_graphs=False) == [0, 1, 2, 3, 4, 5]
    assert draft_counts(7, has_graphs=False) == [0, 1, 2, 3, 5, 7]
    assert draft_counts(15, has_graphs=False) == [0, 1, 2, 3, 5, 7, 11, 15]


@pytest.mark.parametrize("max_k", [1, 3, 5, 7, 15])
def test_with_graphs_the_k_are_those_for_which_they_are_captured(max_k: int) -> None:
    assert draft_counts(max_k, has_graphs=True) == [*ladder_up_to(max_k)]


def test_every_k_answers_the_same_prompts_at_every_batch_size() -> None:
    rounds = make_rounds(8, range(4), prompts=30)
    assert Counter((each.batch, each.k) for each in rounds) == {
        (batch, k): 2 if batch <= 4 else 1 for batch in (1, 2, 4, 8) for k in range(4)
    }
    assert all(len(each.prompts) == each.batch for each in rounds)
    at_eight = {tuple(each.prompts) for each in rounds if each.batch == 8}
    assert len(at_eight) == 1
    at_one = {tuple(each.prompts) for each in rounds if each.batch == 1}
    assert len(at_one) == 2  # the second time another


def test_small_batches_are_repeated() -> None:
    rounds = make_rounds(2, [0, 1], prompts=30)
    assert sum(each.batch for each in rounds if each.k == 1) >= 20
    assert len({tuple(each.prompts) for each in rounds if each.batch == 2}) == 9


def test_few_prompts_are_reused() -> None:
    (wide,) = {tuple(each.prompts) for each in make_rounds(8, [0, 1], prompts=3) if each.batch == 8}
    assert set(wide) == {0, 1, 2}


def test_a_short_tuning_has_the_smallest_the_largest_and_some_between() -> None:
    rounds = short_rounds(make_rounds(16, draft_counts(7, has_graphs=False), prompts=30))
    assert Counter((each.batch, each.k) for each in rounds) == {
        (batch, k): 1 for batch in (1, 4, 16) for k in (0, 1, 3, 7)
    }
    few = short_rounds(make_rounds(1, [0, 1], prompts=30))
    assert [(each.batch, each.k) for each in sorted(few, key=lambda each: each.k)] == [
        (1, 0),
        (1, 1),
    ]


def slow_machine(rows: int, precision: str) -> float:
    """It has instructions for float32 only."""
    return (1.0 if precision == "float32" else 3.0) * (1.0 + 0.01 * rows)


FLOAT32: Any = {"precision": "float32", "clock": slow_machine}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(16 << 20))
    return tmp_path


def test_the_estimate_grows_with_the_rounds(folder: Path) -> None:
    small = make_plan(folder, folder, make_rounds(4, [0, 1], 30), [50] * 30, "slices", **FLOAT32)
    large = make_plan(
        folder,
        folder,
        make_rounds(16, draft_counts(7, False), 30),
        [50] * 30,
        "single",
        **FLOAT32,
    )
    assert 1 < small.minutes < large.minutes / 3
    assert product_seconds(1) > 0
    assert "batch sizes 1, 2, 4, 8, 16 with K = 0, 1, 2, 3, 5, 7" in large.text()
    assert (small.server_starts, large.server_starts) == (2, 2)
    assert "one after the other, because memory does not hold both" in large.text()
    assert "including the start of 2 servers" in large.text()


def test_the_estimate_is_for_the_type_that_is_served(folder: Path) -> None:
    rounds = make_rounds(4, [0, 1], 30)
    exact, emulated = (
        make_plan(
            folder, folder, rounds, [50] * 30, "slices", precision, clock=slow_machine
        ).minutes
        for precision in ("float32", "bfloat16")
    )
    assert emulated > 1.5 * exact


def test_the_estimate_counts_prefill_drafting_and_all_steps(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "none").mkdir()
    rounds = make_rounds(1, [0, 1], 30)
    none = tmp_path / "none"

    def minutes(drafter: Path, prompt: int) -> float:
        return make_plan(folder, drafter, rounds, [prompt] * 30, "slices", **FLOAT32).minutes

    steps_only = minutes(none, 0)
    assert minutes(folder, 0) > steps_only
    assert minutes(none, 500) > steps_only
    # 20 rounds with K = 1: 40 tokens in four of five steps, in turns of 7 steps and 4 bare ones.
    step = 1.6 * 0.5 * 1.01
    assert 60 * steps_only > 20 * 8 * (7 + 4) * step


def test_a_short_tuning_takes_less(folder: Path) -> None:
    rounds = make_rounds(4, [0, 1, 3], 30)
    lengths = [50] * 30
    usual = make_plan(folder, folder, rounds, lengths, "slices", **FLOAT32)
    short = make_plan(
        folder,
        folder,
        short_rounds(rounds),
        lengths,
        "slices",
        "float32",
        SHORT_TOKENS,
        slow_machine,
    )
    assert short.minutes < usual.minutes / 3
    assert "16 tokens each" in short.text()
    assert "40 tokens each" in usual.text()


def test_passes_that_were_measured_are_estimated_as_measured() -> None:
    times = ProductTimes.of_passes(10e6, one=0.1, many=0.4, tokens=16)
    assert times.forward_seconds(10e6, 1) == pytest.approx(0.1)
    assert times.forward_seconds(10e6, 16) == pytest.approx(0.4)
    assert times.forward_seconds(20e6, 16) == pytest.approx(0.8)
    assert ProductTimes.of_passes(10e6, 0.1, 0.05, 1).per_token == 0
