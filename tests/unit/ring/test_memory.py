"""Ring files: what is written is read, until it is overwritten, and never anything else."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leadout.ring.memory import (
    HEADER_BYTES,
    MIN_CAPACITY,
    RingError,
    RingFileReader,
    RingWriter,
    is_abandoned,
)

CAPACITY = MIN_CAPACITY


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[tuple[RingWriter, RingFileReader]]:
    writer = RingWriter(tmp_path / "states-1", CAPACITY)
    yield writer, RingFileReader(writer.path)
    writer.close()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=CAPACITY // 3), max_size=40), st.integers(1, 5))
def test_a_reader_gets_all_records_or_the_last_ones_and_counts_the_lost(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], every: int
) -> None:
    writer = RingWriter(tmp_path_factory.mktemp("ring") / "states-1", CAPACITY)
    reader = RingFileReader(writer.path)
    read: list[bytes] = []
    for number, content in enumerate(contents):
        assert writer.write([content[:3], content[3:]])
        if number % every == 0:
            read += reader.records()
    read += reader.records()
    rest = iter(contents)
    assert all(each in rest for each in read)  # in the order in which they were written
    assert len(read) + reader.lost == len(contents)
    if every == 1:
        assert reader.lost == 0
    reader.close()
    writer.close()


def test_a_record_larger_than_the_ring_is_refused_and_harms_nothing(
    ring: tuple[RingWriter, RingFileReader],
) -> None:
    writer, reader = ring
    assert writer.write([b"first"])
    assert not writer.write([bytes(CAPACITY)])
    assert list(reader.records()) == [b"first"]


def test_an_overtaken_reader_goes_on_with_the_oldest_record_that_is_left(
    ring: tuple[RingWriter, RingFileReader],
) -> None:
    writer, reader = ring
    writer.write([b"old"])
    assert list(reader.records()) == [b"old"]
    for number in range(100):
        writer.write([number.to_bytes(2, "little") * 50])
    found = [int.from_bytes(each[:2], "little") for each in reader.records()]
    assert found == list(range(100 - len(found), 100))
    assert reader.lost == 100 - len(found) > 0


def test_a_new_reader_begins_with_the_oldest_record(
    ring: tuple[RingWriter, RingFileReader],
) -> None:
    writer, _ = ring
    for number in range(100):
        writer.write([bytes([number]) * 100])
    late = RingFileReader(writer.path)
    found = [each[0] for each in late.records()]
    assert found == list(range(100 - len(found), 100))
    assert late.lost == 0


def test_only_the_user_can_read_a_file(ring: tuple[RingWriter, RingFileReader]) -> None:
    assert stat.S_IMODE(ring[0].path.stat().st_mode) == 0o600


def test_closing_removes_the_file_but_an_attached_reader_reads_the_rest(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "texts-1", CAPACITY)
    reader = RingFileReader(writer.path)
    writer.write([b"last words"])
    assert not reader.is_abandoned
    writer.close()
    assert not (tmp_path / "texts-1").exists()
    assert reader.is_abandoned
    assert list(reader.records()) == [b"last words"]


def test_a_file_that_does_not_fit_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="smaller ring"):
        RingWriter(tmp_path / "missing" / "states-1", CAPACITY)
    with pytest.raises(RingError, match="smaller ring"):
        RingWriter(tmp_path / "states-1", 1 << 42)
    assert not list(tmp_path.iterdir())


def write_for_ever(path: Path) -> None:
    writer, number = RingWriter(path, CAPACITY), 0
    while True:
        length = random.Random(number).randrange(900)
        writer.write([number.to_bytes(8, "little"), bytes([number % 251]) * length])
        number += 1


def test_a_reader_beside_a_fast_writer_sees_only_whole_records_also_after_a_kill(
    tmp_path: Path,
) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=write_for_ever, args=(tmp_path / "states-1",), daemon=True
    )
    process.start()
    while not (tmp_path / "states-1").exists():
        assert process.is_alive()
    reader, last, seen = RingFileReader(tmp_path / "states-1"), -1, 0
    first = None
    is_killed = False
    while True:
        for content in reader.records():
            number = int.from_bytes(content[:8], "little")
            assert number > last
            assert content[8:] == bytes([number % 251]) * random.Random(number).randrange(900)
            last, seen = number, seen + 1
            first = number if first is None else first
        if is_killed:
            break
        if seen > 20_000:
            assert process.pid is not None
            assert not reader.is_abandoned
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            is_killed = True
    assert first is not None
    assert seen + reader.lost == last + 1 - first
    assert reader.is_abandoned
    assert is_abandoned(tmp_path / "states-1")


def test_damaged_files_give_a_ring_error_or_whole_records(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "states-1", CAPACITY)
    contents = [bytes([number]) * 100 for number in range(60)]
    for content in contents:
        writer.write([content])
    sound, chance = (tmp_path / "states-1").read_bytes(), random.Random(0)
    outcomes = set()
    for number in range(2000):
        damaged = bytearray(sound)
        for _ in range(chance.randrange(1, 5)):
            in_header = chance.random() < 0.5
            at = chance.randrange(64) if in_header else chance.randrange(len(damaged))
            damaged[at] = chance.randrange(256)
        if number % 10 == 0:
            del damaged[chance.randrange(len(damaged)) :]
        path = tmp_path / "damaged"
        path.write_bytes(damaged)
        try:
            reader = RingFileReader(path)
            found = list(reader.records())
            reader.close()
        except RingError:
            outcomes.add("refused")
        else:
            assert all(each in contents for each in found)
            outcomes.add("read")
    assert outcomes == {"refused", "read"}


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "empty", "other"])
def test_what_is_no_ring_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "states-1"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "missing":
        path.write_bytes(bytes(2 * HEADER_BYTES) if kind == "other" else b"")
    with pytest.raises(RingError):
        RingFileReader(path)
