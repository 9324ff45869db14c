"""A data folder in little space, to be kept under version control or published.

A packed folder has the manifests of a data folder and its samples compressed with gzip, about one
byte for each token. Prompts that must not be published, or that are published elsewhere, can be
left out if they can be made again. `unpack` restores the same folder, to train on or to continue
with `leadout data --resume`, and verifies it by its content hash.
"""

from __future__ import annotations

import gzip
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from leadout.data.manifest import DataFolder
from leadout.files import MAX_MIB, first_problem, opened, read_text, replacing, write_text
from leadout.shards import Sample, ShardError, read_shard

HASH = "content.sha256"
_SUFFIX = ".gz"


def pack(
    source: Path, destination: Path, leave_out: Callable[[Sample], bool] = lambda _: False
) -> None:
    """Write a data folder in packed form; an earlier one of the same job is replaced.

    `leave_out` chooses the samples whose prompts are left out. The same samples give the same
    bytes, on any day.
    """
    data = DataFolder(source)
    _require_same_job(data, destination, "Pack")
    destination.mkdir(parents=True, exist_ok=True)
    for shard in data.shards:
        with (
            replacing(destination / (shard.name + _SUFFIX)) as temporary,
            temporary.open("wb") as file,
            gzip.GzipFile("", "wb", compresslevel=9, fileobj=file, mtime=0) as compressed,
        ):
            for _, sample in read_shard(shard):
                kept = sample.model_copy(update={"prompt": []}) if leave_out(sample) else sample
                compressed.write(_line(kept))
    _copy_manifests(source, destination)
    write_text(destination / HASH, data.content_hash() + "\n")


def unpack(
    source: Path, destination: Path, prompt_of: Callable[[Sample], Sequence[int]] | None = None
) -> DataFolder:
    """Restore a data folder; files that `destination` already has are kept.

    So a folder that has been continued since it was packed loses nothing. `prompt_of` makes the
    token ids of a prompt that was left out.
    """
    packed = DataFolder(source)
    _require_same_job(packed, destination, "Unpack")
    destination.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("samples-*.jsonl" + _SUFFIX)):
        shard = destination / path.name.removesuffix(_SUFFIX)
        if not shard.exists():
            with replacing(shard) as temporary, temporary.open("wb") as file:
                for sample in _samples(path):
                    file.write(_line(_completed(sample, path, prompt_of)))
    continued = any(destination.glob("manifest-*.json"))
    if not continued:
        _copy_manifests(source, destination)
    found = DataFolder(destination)
    expected = read_text(source / HASH).strip()
    if not continued and found.content_hash() != expected:
        for path in (*found.shards, *destination.glob("manifest-*.json")):
            path.unlink()
        raise ShardError(
            f"{source}: its samples do not have the content hash in {HASH}. Restore its files; "
            "make prompts that were left out from the same prompt files with the same tokenizer."
        )
    return found


def _require_same_job(data: DataFolder, folder: Path, verb: str) -> None:
    if any(folder.glob("manifest-*.json")) and DataFolder(folder).job != data.job:
        raise ShardError(
            f"{folder} has the data of another job than {data.folder}. {verb} it into another "
            "folder."
        )


def _copy_manifests(source: Path, destination: Path) -> None:
    for manifest in sorted(source.glob("manifest-*.json")):
        with replacing(destination / manifest.name) as temporary:
            shutil.copyfile(manifest, temporary)


def _line(sample: Sample) -> bytes:
    """As `ShardWriter` writes it."""
    return sample.model_dump_json().encode() + b"\n"


def _completed(
    sample: Sample, path: Path, prompt_of: Callable[[Sample], Sequence[int]] | None
) -> Sample:
    if sample.prompt:
        return sample
    if prompt_of is None:
        raise ShardError(
            f"{path}: the prompt of {sample.id} was left out when it was packed; it must be made "
            "again to unpack it."
        )
    return sample.model_copy(update={"prompt": list(prompt_of(sample))})


def _samples(path: Path) -> Iterator[Sample]:
    with opened(path) as compressed:
        try:
            with gzip.open(compressed) as lines:
                while line := lines.readline(MAX_MIB * 2**20):
                    yield Sample.model_validate_json(line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
            raise ShardError(
                f"{path} is damaged ({problem}); expected samples compressed with gzip. Restore "
                "the file."
            ) from None
        except ValidationError as problem:
            raise ShardError(
                f"{path} is damaged ({first_problem(problem, 'line')}); expected a sample on each "
                "line. Restore the file."
            ) from None
