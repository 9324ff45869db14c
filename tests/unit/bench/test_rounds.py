"""Measured cells survive a kill, and only those of the same bench go on."""

from pathlib import Path

import pytest
from sample_rounds import drifting_rate, measured, settings

from leadout.bench.results import ROUNDS, SETTINGS, RoundsFile
from leadout.bench.settings import BenchError

GIVEN = settings(rounds=1)
MEASURED = measured(GIVEN, drifting_rate(1.2))


def written(folder: Path, count: int = 3) -> RoundsFile:
    rounds = RoundsFile(folder)
    assert rounds.begin(GIVEN, resume=False) == []
    for each in MEASURED[:count]:
        rounds.append(each)
    return rounds


def test_rounds_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert written(tmp_path / "new" / "folder").read() == MEASURED[:3]


def test_a_resumed_bench_has_what_was_measured(tmp_path: Path) -> None:
    written(tmp_path)
    assert RoundsFile(tmp_path).begin(GIVEN, resume=True) == MEASURED[:3]


def test_a_line_that_a_kill_has_cut_is_measured_again(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / ROUNDS
    path.write_bytes(path.read_bytes()[:-40])
    rounds = RoundsFile(tmp_path)
    assert rounds.begin(GIVEN, resume=True) == MEASURED[:2]
    rounds.append(MEASURED[2])
    assert rounds.read() == MEASURED[:3]


def test_a_broken_line_elsewhere_is_an_error_with_its_number(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / ROUNDS
    first, second, third = path.read_text().splitlines()
    path.write_text(f"{first}\n{second[:-9]}\n{third}\n")
    with pytest.raises(BenchError, match=r"rounds\.jsonl, line 2: found .*, wanted a measured"):
        RoundsFile(tmp_path).read()


def test_rounds_are_not_overwritten_without_resume(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(BenchError, match=r"found the rounds of an earlier bench.*add --resume"):
        RoundsFile(tmp_path).begin(GIVEN, resume=False)


def test_more_rounds_go_on_with_the_earlier_ones(tmp_path: Path) -> None:
    written(tmp_path)
    assert RoundsFile(tmp_path).begin(settings(rounds=5), resume=True) == MEASURED[:3]


def test_another_bench_does_not_go_on_with_them(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(BenchError, match=r"--resume: found concurrencies \[1, 4\], wanted"):
        RoundsFile(tmp_path).begin(settings(concurrencies=(1, 4), rounds=1), resume=True)
    (tmp_path / SETTINGS).unlink()
    with pytest.raises(BenchError, match=r"settings\.json: found no settings"):
        RoundsFile(tmp_path).begin(GIVEN, resume=True)
