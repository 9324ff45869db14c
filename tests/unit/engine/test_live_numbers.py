"""The last minute of live control, and its way to the API process."""

import time
from pathlib import Path

import pytest

from leadout.engine.live import (
    LiveNumbers,
    NumbersWindow,
    numbers_file,
    read_numbers,
    write_numbers,
)
from leadout.engine.metrics import GAUGES, fill_live, live_families


def step(at: float, **values: float) -> LiveNumbers:
    return LiveNumbers.model_validate({"written": at, "steps": 1, **values})


def test_the_window_holds_one_minute() -> None:
    window = NumbersWindow()
    window.add(step(100.2, drafted=7, made=7, verified=3, gain=1.5))
    window.add(step(100.7, drafted=5, made=7, verified=4, copied=1, probes=1, gain=1.6))
    window.add(step(130.0, drafted=0, gain=1.0))
    total = window.total(131.0)
    assert (total.steps, total.drafted, total.probes, total.gain) == (3, 12, 1, 1.0)
    assert total.draft_length == 4.0
    assert total.skipped_share == pytest.approx(1 - 6 / 14)
    assert total.copied_share == pytest.approx(1 / 7)
    later = window.total(161.0)
    assert (later.steps, later.drafted) == (1, 0)
    assert (later.skipped_share, later.copied_share) == (0.0, 0.0)


def test_numbers_reach_a_reader_and_grow_old(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    assert read_numbers(path) is None
    fresh = step(time.time(), drafted=3, gain=2.0)
    write_numbers(fresh, path)
    assert read_numbers(path) == fresh
    assert list(tmp_path.iterdir()) == [path]
    write_numbers(step(time.time() - 61), path)
    assert read_numbers(path) is None
    path.write_text('{"written": 1, "else": 2}')
    assert read_numbers(path) is None


def test_gauges_show_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    gauges = live_families()
    fill_live(gauges, ["model", "0"], path)
    assert not any(gauge.samples for gauge in gauges)
    write_numbers(step(time.time(), drafted=3, made=4, verified=4, copied=1, probes=2), path)
    fill_live(gauges, ["model", "0"], path)
    shown = {gauge.name: [sample.value for sample in gauge.samples] for gauge in gauges}
    assert shown == {
        "leadout:draft_length": [3.0],
        "leadout:skipped_drafts": [0.25],
        "leadout:copied_drafts": [0.25],
        "leadout:probes": [2.0],
        "leadout:estimated_gain": [],  # not known yet
    }
    assert list(shown) == list(GAUGES)


def test_each_engine_has_a_file_of_its_own() -> None:
    assert numbers_file("ab", 0) != numbers_file("ab", 1)
    assert numbers_file("ab", 0) != numbers_file("ac", 0)
