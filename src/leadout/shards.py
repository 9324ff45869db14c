"""Training text: append-only JSONL files with one sample of token ids per line, or in memory.

Each line is written by one call, so a killed writer leaves at most one incomplete line at the end,
which the next writer truncates. A file lock excludes a second writer. Readers ignore an incomplete
line and fetch samples by their offset, so they keep no tokens in memory.
"""

from __future__ import annotations

import hashlib
import os
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from leadout.errors import LeadoutError, shown
from leadout.files import Timeout, first_problem, lock, opened, read_lines


class ShardError(LeadoutError):
    """A shard that cannot be read or written."""


# No vocabulary is larger. Whoever knows the target's compares with that.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FailFast()]


class Sample(BaseModel):
    """One answer of the target, with its prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    id: str
    source: str
    prompt: TokenIds
    response: TokenIds
    temperature: float


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """What is known of a sample without reading it again."""

    id: str
    source: str
    temperature: float
    prompt_length: int
    response_length: int
    prompt_hash: bytes

    @classmethod
    def of(cls, sample: Sample) -> Self:
        digest = hashlib.sha256(repr(sample.prompt).encode()).digest()
        return cls(
            sample.id,
            sys.intern(sample.source),
            sample.temperature,
            len(sample.prompt),
            len(sample.response),
            digest[:16],
        )


class ShardWriter:
    """Appends samples to one file, which it locks against other writers."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = lock(path.with_name(f".{path.name}.lock"), seconds=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise ShardError(
                f"{path.parent}: another process is writing {path.name}. Wait until it has ended, "
                "or write another part of the data with --shard."
            ) from None
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        _truncate_incomplete_line(self._handle)

    def append(self, sample: Sample) -> None:
        line = sample.model_dump_json().encode() + b"\n"
        try:
            written = os.write(self._handle, line)
        except OSError as problem:
            raise ShardError(f"{self.path} cannot be written: {problem.strerror}.") from None
        if written != len(line):
            raise ShardError(
                f"{self.path}: wrote {written} of {len(line)} bytes; is the disk full?"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Forgotten before anything can fail: the number may belong to another file afterwards.
        handle, self._handle = self._handle, -1
        try:
            os.fsync(handle)
        finally:
            try:
                os.close(handle)
            finally:
                self._lock.release()


def read_shard(path: Path) -> Iterator[tuple[int, Sample]]:
    """Offset and sample of each complete line of a file."""
    offset = 0
    for number, line in enumerate(read_lines(path), start=1):
        if line.endswith(b"\n"):
            yield offset, _parse(line, f"{path}, line {number}")
        offset += len(line)


def usable_samples(
    path: Path, vocab_size: int, unseal: Callable[[bytes], bytes | None] = lambda line: line
) -> Iterator[tuple[bytes, Sample] | None]:
    """Each complete line with its sample; None for a line that cannot be trained on.

    Such a line is no sample, or has a token id that the target does not have. `unseal` decrypts a
    line; None for one that is damaged.
    """
    for written in read_lines(path):
        if not written.endswith(b"\n"):
            continue
        line = unseal(written)
        try:
            sample = Sample.model_validate_json(line or b"")
        except ValidationError:
            yield None
            continue
        largest = max((*sample.prompt, *sample.response), default=0)
        yield (line, sample) if line is not None and largest < vocab_size else None


class WrittenSamples(Mapping[str, Sample]):
    """The samples of one file by id; only ids and offsets are kept in memory."""

    def __init__(self, path: Path, each: Callable[[Sample], None]) -> None:
        """`each` is called once with every sample while the file is indexed."""
        self._path = path
        self._offsets: dict[str, int] = {}
        for offset, sample in read_shard(path):
            if sample.id in self._offsets:
                raise _repeated(path, sample.id)
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


class SampleSet(Sequence[Sample], ABC):
    """Samples of several parts in the order of their ids, whichever part each is in."""

    facts: list[SampleFacts]

    @abstractmethod
    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        """The sample, which may be read from a file each time."""

    def __len__(self) -> int:
        return len(self.facts)

    @abstractmethod
    def part_of(self, index: int) -> str:
        """The name of the part, or file, of a sample."""


class SamplesInMemory(SampleSet):
    """Samples that are in no file, in named parts."""

    def __init__(self, parts: Mapping[str, Sequence[Sample]]) -> None:
        found = [(sample, name) for name, samples in parts.items() for sample in samples]
        found.sort(key=lambda item: item[0].id)
        for (first, _), (second, part) in pairwise(found):
            if first.id == second.id:
                raise ShardError(f"{part}: the sample {shown(second.id)} occurs twice.")
        self.facts = [SampleFacts.of(sample) for sample, _ in found]
        self._samples = [sample for sample, _ in found]
        self._parts = [part for _, part in found]

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        return self._samples[index]

    def part_of(self, index: int) -> str:
        return self._parts[index]


class Samples(SampleSet):
    """The samples of several files; each file is a part."""

    def __init__(
        self, paths: Sequence[Path], each: Callable[[Sample], None] = lambda _: None
    ) -> None:
        """`each` is called once with every sample while the files are indexed."""
        self._paths = list(paths)
        found: list[tuple[SampleFacts, int, int]] = []
        for shard, path in enumerate(self._paths):
            for offset, sample in read_shard(path):
                found.append((SampleFacts.of(sample), shard, offset))
                each(sample)
        found.sort(key=lambda item: item[0].id)
        for (first, _, _), (second, shard, _) in pairwise(found):
            if first.id == second.id:
                raise _repeated(self._paths[shard], second.id)
        self.facts = [facts for facts, _, _ in found]
        self._shards = array("H", (shard for _, shard, _ in found))  # the file of each sample ...
        self._offsets = array("q", (offset for _, _, offset in found))  # ... and its offset there

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        return _sample_at(self._paths[self._shards[index]], self._offsets[index])

    def part_of(self, index: int) -> str:
        return self._paths[self._shards[index]].name


def _repeated(path: Path, name: str) -> ShardError:
    return ShardError(
        f"{path}: the sample {shown(name)} occurs twice, expected each once. Two jobs wrote to "
        "this folder; remove the files of one of them."
    )


def _sample_at(path: Path, offset: int) -> Sample:
    with opened(path) as file:
        file.seek(offset)
        return _parse(file.readline(), f"{path}, at byte {offset}")


def _parse(line: bytes, where: str) -> Sample:
    try:
        return Sample.model_validate_json(line)
    except ValidationError as problem:
        raise ShardError(
            f"{where}: {first_problem(problem, 'line')}; expected a sample as written by `leadout "
            "data`."
        ) from None


def _truncate_incomplete_line(handle: int) -> None:
    end = os.fstat(handle).st_size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    os.ftruncate(handle, end)
