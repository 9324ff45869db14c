"""Training text on the disk: JSONL files that only grow, one sample a line, in token ids.

A line is written by one call, so a killed writer leaves at most one torn line at the end; the next
writer cuts it off. A lock, which dies with its process, keeps a second writer out. Readers take
whole lines only and fetch samples by their place in the file, so what they keep in memory is a few
bytes for each sample.
"""

from __future__ import annotations

import fcntl
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from leadout.errors import LeadoutError


class ShardError(LeadoutError):
    """A shard that cannot be read, or a place that cannot be written."""


class Sample(BaseModel):
    """One answer of the target, with all that came before it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    source: str
    prompt: list[int]
    response: list[int]
    temperature: float


class ShardWriter:
    """Appends samples to one file, which no one else writes meanwhile."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._handle)
            raise ShardError(
                f"{path}: found another process that writes it, wanted it free; wait for that "
                "process to end, or give this one a part of its own with --shard"
            ) from None
        _cut_torn_line(self._handle)

    def append(self, sample: Sample) -> None:
        line = sample.model_dump_json().encode() + b"\n"
        try:
            written = os.write(self._handle, line)
        except OSError as problem:
            raise ShardError(f"{self.path}: cannot be written: {problem.strerror}") from None
        if written != len(line):
            raise ShardError(
                f"{self.path}: wrote {written} of {len(line)} bytes; is the disk full?"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.fsync(self._handle)
        os.close(self._handle)


def read_shard(path: Path) -> Iterator[tuple[int, Sample]]:
    """Every whole sample of a file and its offset; a torn last line is passed over."""
    with path.open("rb") as lines:
        offset = 0
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                yield offset, _parse(line, f"{path}, line {number}")
            offset += len(line)


class WrittenSamples(Mapping[str, Sample]):
    """The samples of one file by their ids; in memory are only the ids and where they are."""

    def __init__(self, path: Path, each: Callable[[Sample], None]) -> None:
        """`each` sees every sample once, while the file is read."""
        self._path = path
        self._offsets: dict[str, int] = {}
        for offset, sample in read_shard(path):
            if sample.id in self._offsets:
                raise _found_twice(path, sample.id)
            self._offsets[sample.id] = offset
            each(sample)

    def __getitem__(self, name: str) -> Sample:
        return _sample_at(self._path, self._offsets[name])

    def __contains__(self, name: object) -> bool:
        return name in self._offsets

    def __iter__(self) -> Iterator[str]:
        return iter(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets)


class Samples(Sequence[Sample]):
    """The samples of several files, in the order of their ids: the same for the same set."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._shards = array("H")  # of each sample, the file ...
        self._offsets = array("q")  # ... and where in it the sample begins
        for _, shard, offset in _places_by_id(self._paths):
            self._shards.append(shard)
            self._offsets.append(offset)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        return _sample_at(self._paths[self._shards[index]], self._offsets[index])

    def path_of(self, index: int) -> Path:
        """The file that a sample is in."""
        return self._paths[self._shards[index]]


def _places_by_id(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    found = [
        (sample.id, shard, offset)
        for shard, path in enumerate(paths)
        for offset, sample in read_shard(path)
    ]
    found.sort()
    for (first, _, _), (second, shard, _) in pairwise(found):
        if first == second:
            raise _found_twice(paths[shard], second)
    return found


def _found_twice(path: Path, name: str) -> ShardError:
    return ShardError(
        f"{path}: found the sample {name!r} twice, wanted each once; two jobs wrote to this "
        "folder: remove one of their files"
    )


def _sample_at(path: Path, offset: int) -> Sample:
    with path.open("rb") as file:
        file.seek(offset)
        return _parse(file.readline(), f"{path}, at byte {offset}")


def _parse(line: bytes, where: str) -> Sample:
    try:
        return Sample.model_validate_json(line)
    except ValidationError as problem:
        first = problem.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "line"
        raise ShardError(
            f"{where}: {field}: {first['msg']}; wanted a sample as `leadout data` writes it"
        ) from None


def _cut_torn_line(handle: int) -> None:
    end = os.fstat(handle).st_size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    os.ftruncate(handle, end)
