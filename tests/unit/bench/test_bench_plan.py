"""The order of the cells, the prompts of a round, and how long it all takes."""

import json
from collections import Counter
from pathlib import Path

import pytest
from sample_rounds import BARE, FIXED, TUNED, settings

from leadout.bench.settings import (
    BenchError,
    PromptSet,
    Rates,
    all_cells,
    make_plan,
    read_sets,
    write_prompts,
)


def test_every_cell_is_measured_once_a_round_on_every_arm() -> None:
    given = settings(arms=(BARE, FIXED, TUNED), rounds=3)
    cells = all_cells(given)
    assert len(cells) == len(set(cells)) == 2 * 2 * 3 * 3
    assert Counter(cell.arm for cell in cells) == {"bare": 12, "fixed": 12, "tuned": 12}


def test_arms_follow_each_other_at_every_cell_and_another_begins_each_round() -> None:
    given = settings(arms=(BARE, FIXED, TUNED), sets=("math",), concurrencies=(8,), rounds=4)
    order = [cell.arm for cell in all_cells(given)]
    assert order[0:3] == ["bare", "fixed", "tuned"]
    assert order[3:6] == ["fixed", "tuned", "bare"]
    assert order[6:9] == ["tuned", "bare", "fixed"]
    assert order[9:12] == order[0:3]


def test_requests_grow_with_concurrency() -> None:
    given = settings()
    assert [given.requests_at(c) for c in (1, 4, 16)] == [3, 8, 32]


def test_rounds_take_other_prompts_and_begin_anew_at_the_end() -> None:
    prompts = PromptSet("some", ("a", "b", "c", "d", "e"), "hash")
    assert prompts.of_round(0, 2) == ["a", "b"]
    assert prompts.of_round(1, 2) == ["c", "d"]
    assert prompts.of_round(2, 2) == ["e", "a"]
    assert prompts.of_round(0, 7) == ["a", "b", "c", "d", "e", "a", "b"]


def test_prompts_are_first_turns_by_file(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text('{"turns": ["first", "second"]}\n{"turns": ["third"]}\n')
    (tmp_path / "task.jsonl").write_text('{"prompt": "do it"}\n')
    talk, task = read_sets([str(tmp_path / "talk.jsonl"), str(tmp_path / "task.jsonl")])
    assert (talk.name, talk.texts) == ("talk", ("first", "third"))
    assert (task.name, task.texts) == ("task", ("do it",))
    assert talk.hash != task.hash


def test_without_a_file_the_packaged_sets_are_taken() -> None:
    assert [each.name for each in read_sets([])] == ["chat", "code", "math"]


def test_prompts_that_the_target_would_write_are_refused() -> None:
    with pytest.raises(BenchError, match="wanted texts"):
        read_sets(["self:3"])


def test_prompts_are_written_as_the_generator_reads_them(tmp_path: Path) -> None:
    path = write_prompts(["one\nline", "Ünï"], tmp_path / "p.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"prompt": "one\nline"}, {"prompt": "Ünï"}]


def test_a_plan_counts_what_is_left_and_says_where_its_speed_is_from() -> None:
    given = settings(sets=("math",), concurrencies=(1, 8), rounds=2)
    rates = Rates({1: 32.0, 8: 256.0}, "a probe")
    fresh = make_plan(given, [], rates)
    assert (fresh.cells, fresh.cells_done) == (8, 0)
    # Two rounds, two arms: 3 requests at 1, 16 at 8, of 64 tokens each.
    assert fresh.output_tokens == 2 * 2 * (3 + 16) * 64
    seconds = 4 * (3 * 64 / 32 + 16 * 64 / 256) + 8 * 1.5
    assert fresh.minutes == pytest.approx(seconds / 60)
    assert fresh.rates_from == "a probe"
    half = make_plan(given, all_cells(given)[:4], rates)
    assert (half.cells, half.cells_done) == (4, 4)
    assert half.minutes == pytest.approx(fresh.minutes / 2)
