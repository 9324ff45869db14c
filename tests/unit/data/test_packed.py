"""A packed data folder is small, the same on any day, and becomes the same folder again."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from leadout.data.manifest import NONE, DataFolder, Job, Manifest, manifest_path, shard_path
from leadout.data.packed import pack, unpack
from leadout.shards import Sample, ShardError, ShardWriter


def write_part(folder: Path, job: Job, part: int, samples: int) -> None:
    draw = random.Random(part)
    with ShardWriter(shard_path(folder, part, job.parts)) as writer:
        for number in range(samples):
            # Token ids of a large vocabulary, some much more frequent than others.
            tokens = [int(150_000 * draw.random() ** 6) for _ in range(200)]
            writer.append(
                Sample(
                    id=f"{part}/{number}",
                    source="s",
                    prompt=tokens[:50],
                    response=tokens[50:],
                    temperature=0.0,
                )
            )
    counts = {"s": NONE.plus(50, 150)}
    manifest = Manifest(job=job, part=part, complete=False, counts=counts, skipped=0, versions={})
    manifest.write(manifest_path(folder, part, job.parts))


@pytest.fixture
def folder(tmp_path: Path, job: Callable[..., Job]) -> Path:
    for part in (1, 2):
        write_part(tmp_path / "data", job(parts=2), part, 20)
    return tmp_path / "data"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def test_unpacking_restores_every_byte_in_less_space(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "packed")
    unpacked = unpack(tmp_path / "packed", tmp_path / "again")
    assert files(tmp_path / "again") == files(folder)  # gunzip alone would do
    assert unpacked.content_hash() == DataFolder(folder).content_hash()
    assert len(unpacked.samples()) == 40
    sizes = [sum(map(len, files(each).values())) for each in (folder, tmp_path / "packed")]
    assert sizes[1] < 0.5 * sizes[0]


def test_the_same_samples_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "one")
    for path in folder.iterdir():
        path.touch()
    pack(folder, tmp_path / "two")
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_a_continued_job_is_packed_again_and_unpacking_loses_nothing_of_it(
    folder: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    pack(folder, packed)
    with ShardWriter(shard_path(folder, 2, 2)) as writer:
        writer.append(Sample(id="new", source="s", prompt=[1], response=[2, 3], temperature=0.0))
    assert len(unpack(packed, folder).samples()) == 41
    pack(folder, packed)
    assert len(unpack(packed, tmp_path / "again").samples()) == 41


def test_folders_of_other_jobs_are_refused(
    folder: Path, tmp_path: Path, job: Callable[..., Job]
) -> None:
    write_part(tmp_path / "other", job(dtype="bfloat16"), 1, 3)
    pack(folder, tmp_path / "packed")
    with pytest.raises(ShardError, match=r"of another job.*Pack it into another folder"):
        pack(tmp_path / "other", tmp_path / "packed")
    before = files(tmp_path / "other")
    with pytest.raises(ShardError, match=r"of another job.*Unpack it into another folder"):
        unpack(tmp_path / "packed", tmp_path / "other")
    assert files(tmp_path / "other") == before


def test_prompts_that_were_left_out_are_made_again(folder: Path, tmp_path: Path) -> None:
    packed, samples = tmp_path / "packed", list(DataFolder(folder).samples())
    prompts = {sample.id: sample.prompt for sample in samples if sample.id.startswith("1/")}
    pack(folder, packed, lambda sample: sample.id in prompts)
    assert str(samples[0].prompt)[1:-1].replace(" ", "").encode() not in gzip.decompress(
        (packed / "samples-1-of-2.jsonl.gz").read_bytes()
    )
    with pytest.raises(ShardError, match=r"prompt of 1/0 was left out .* made again"):
        unpack(packed, tmp_path / "none")
    unpack(packed, tmp_path / "again", lambda sample: prompts[sample.id])
    assert files(tmp_path / "again") == files(folder)


def test_prompts_that_are_made_differently_are_refused(folder: Path, tmp_path: Path) -> None:
    packed, again = tmp_path / "packed", tmp_path / "again"
    pack(folder, packed, lambda _: True)
    with pytest.raises(ShardError, match=r"do not have the content hash in content\.sha256"):
        unpack(packed, again, lambda _: [1, 2, 3])
    assert not any(again.glob("*.json*"))


@pytest.mark.parametrize("damage", ["cut", "changed", "text"])
def test_damaged_files_are_reported_and_leave_nothing_behind(
    folder: Path, tmp_path: Path, damage: str
) -> None:
    pack(folder, tmp_path / "packed")
    path = tmp_path / "packed" / "samples-1-of-2.jsonl.gz"
    content = bytearray(path.read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "changed":
        content[len(content) // 2] ^= 255
    else:
        content[:] = b"no gzip at all\n"
    path.write_bytes(content)
    with pytest.raises(ShardError, match=r"samples-1-of-2\.jsonl\.gz is damaged.*Restore the file"):
        unpack(tmp_path / "packed", tmp_path / "again")
    assert not (tmp_path / "again" / "samples-1-of-2.jsonl").exists()
