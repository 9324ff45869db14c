"""The ledger: several writers, torn lines, and lines of someone else."""

import multiprocessing
from pathlib import Path

import pytest

from leadout.checkpoints import CheckpointError
from leadout.registry import LEDGER, Entry, append, read_ledger


def entry(version: int) -> Entry:
    return Entry(event="swapped", version=version, why="a test", evidence={"ms": 1.5, "ok": True})


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    assert read_ledger(tmp_path) == []
    written = [entry(1), entry(2)]
    for one in written:
        append(tmp_path, one)
    assert read_ledger(tmp_path) == written
    assert written[0].when.endswith("+00:00")


def add_many(folder: Path, version: int) -> None:
    for _ in range(50):
        append(folder, entry(version))


def test_writers_do_not_mix_their_lines(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=add_many, args=(tmp_path, number)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    versions = [one.version for one in read_ledger(tmp_path)]
    assert sorted(versions, key=str) == [1] * 50 + [2] * 50


@pytest.mark.parametrize("torn", ['{"when": "x", "eve', '{"when": "x", "evidence": {"a": 1}'])
def test_a_torn_line_is_passed_over_and_the_next_is_whole(tmp_path: Path, torn: str) -> None:
    append(tmp_path, entry(1))
    with (tmp_path / LEDGER).open("a") as file:
        file.write(torn)
    assert [one.version for one in read_ledger(tmp_path)] == [1]
    append(tmp_path, entry(2))
    assert [one.version for one in read_ledger(tmp_path)] == [1, 2]


def test_a_line_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_text('{"event": "sold", "version": 1, "why": ""}\n')
    with pytest.raises(CheckpointError, match="line 1, event: found 'sold'"):
        read_ledger(tmp_path)
