"""Shards are append-only, survive an incomplete last line, and report what is wrong in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from leadout.shards import Sample, Samples, ShardError, ShardWriter, WrittenSamples, read_shard


def sample(name: str, length: int = 3) -> Sample:
    return Sample(id=name, source="s", prompt=[1, 2], response=list(range(length)), temperature=0.5)


def write(path: Path, *names: str) -> Path:
    with ShardWriter(path) as writer:
        for name in names:
            writer.append(sample(name))
    return path


def test_writers_append(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl"
    write(path, "b", "a")
    write(path, "c")
    assert [found for _, found in read_shard(path)] == [sample("b"), sample("a"), sample("c")]


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("incomplete", [b"{", b'{"id": "x"', b"x" * 200_000])
def test_an_incomplete_line_is_ignored_and_then_truncated(
    tmp_path: Path, kept: int, incomplete: bytes
) -> None:
    path = write(tmp_path / "a.jsonl", *["a"][:kept])
    whole = path.read_bytes()
    path.write_bytes(whole + incomplete)
    assert len(list(read_shard(path))) == len(Samples([path])) == kept
    with ShardWriter(path):
        assert path.read_bytes() == whole
    write(path, "b")
    assert [found.id for _, found in read_shard(path)] == [*["a"][:kept], "b"]


def test_a_whole_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *map(str, range(9)))
    before = path.read_bytes()
    write(path)
    assert path.read_bytes() == before


def test_a_second_writer_is_kept_out_until_the_first_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with ShardWriter(path) as writer:
        writer.append(sample("a"))
        with pytest.raises(ShardError, match=r"another process is writing a\.jsonl"):
            ShardWriter(path)
    write(path, "b")
    assert len(Samples([path])) == 2


def test_samples_come_in_the_order_of_their_ids(tmp_path: Path) -> None:
    one = write(tmp_path / "1.jsonl", "d", "a")
    two = write(tmp_path / "2.jsonl", "c", "b")
    samples = Samples([one, two])
    assert len(samples) == 4
    assert [found.id for found in samples] == ["a", "b", "c", "d"]
    assert samples[2] == sample("c")
    assert [found.id for found in Samples([two, one])] == ["a", "b", "c", "d"]


def test_a_sample_found_twice_is_refused(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.jsonl", "a", "b"), write(tmp_path / "2.jsonl", "b")
    with pytest.raises(ShardError, match=r"2\.jsonl: the sample 'b' occurs twice"):
        Samples([one, two])
    write(one, "a")
    with pytest.raises(ShardError, match=r"1\.jsonl: the sample 'a' occurs twice"):
        WrittenSamples(one, lambda _: None)


def test_written_samples_are_found_by_id_and_seen_once(tmp_path: Path) -> None:
    seen: list[str] = []
    path = write(tmp_path / "a.jsonl", "b", "a")
    written = WrittenSamples(path, lambda found: seen.append(found.id))
    assert seen == ["b", "a"]
    assert "a" in written
    assert "c" not in written
    assert dict(written) == {"a": sample("a"), "b": sample("b")}
    with pytest.raises(KeyError):
        written["c"]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (b"not json\n", "line"),
        (b'{"id": "x"}\n', "source"),
        (b'{"id":"x","source":"s","prompt":[1],"response":["y"],"temperature":0}\n', "response.0"),
        (b"\n", "line"),
    ],
)
def test_a_bad_line_names_file_and_line(tmp_path: Path, line: bytes, field: str) -> None:
    path = write(tmp_path / "a.jsonl", "a")
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(ShardError, match=rf"a\.jsonl, line 2: {field}: "):
        Samples([path])


def test_a_full_disk_is_an_error_and_leaves_a_line_that_is_truncated_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", "a")
    whole, truly_write = path.read_bytes(), os.write
    with ShardWriter(path) as writer:
        monkeypatch.setattr(os, "write", lambda handle, line: truly_write(handle, line[:9]))
        with pytest.raises(ShardError, match=r"wrote 9 of .* is the disk full"):
            writer.append(sample("b"))
    monkeypatch.undo()
    assert len(path.read_bytes()) == len(whole) + 9
    write(path)
    assert path.read_bytes() == whole
