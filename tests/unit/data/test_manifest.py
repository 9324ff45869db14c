"""A data folder has one job, counts by source, and a hash of its content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from leadout.data.manifest import (
    NONE,
    DataFolder,
    Job,
    Manifest,
    manifest_path,
    shard_path,
)
from leadout.shards import Sample, ShardError, ShardWriter


def write_part(folder: Path, job: Job, part: int, names: list[str]) -> None:
    count = NONE
    with ShardWriter(shard_path(folder, part, job.parts)) as writer:
        for name in names:
            writer.append(
                Sample(id=name, source="s", prompt=[1, 2], response=[3, 4, 5], temperature=0.0)
            )
            count = count.plus(2, 3)
    Manifest(
        job=job, part=part, complete=True, counts={"s": count}, skipped=0, versions={"leadout": "0"}
    ).write(manifest_path(folder, part, job.parts))


def test_parts_are_read_as_one(tmp_path: Path, job: Callable[..., Job]) -> None:
    write_part(tmp_path, job(parts=2), 1, ["a", "c"])
    write_part(tmp_path, job(parts=2), 2, ["b"])
    data = DataFolder(tmp_path)
    assert data.job == job(parts=2)
    assert [sample.id for sample in data.samples()] == ["a", "b", "c"]
    assert data.response_tokens == 9
    assert data.manifests[0].counts["s"].prompt_tokens == 4


def test_parts_of_different_jobs_are_an_error(tmp_path: Path, job: Callable[..., Job]) -> None:
    write_part(tmp_path, job(parts=2), 1, ["a"])
    write_part(tmp_path, job(parts=2, target_fingerprint="other"), 2, ["b"])
    with pytest.raises(ShardError, match=r"manifest-2-of-2\.json: belongs to another job"):
        DataFolder(tmp_path)


def test_a_folder_without_manifest_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"contains no manifest.*written by `leadout data`"):
        DataFolder(tmp_path)
    with pytest.raises(ShardError, match="does not exist"):
        DataFolder(tmp_path / "missing")


def test_a_broken_manifest_is_an_error_with_file_and_field(
    tmp_path: Path, job: Callable[..., Job]
) -> None:
    write_part(tmp_path, job(), 1, ["a"])
    path = manifest_path(tmp_path, 1, 1)
    content = json.loads(path.read_text())
    content["job"]["sampling"]["top_p"] = "wide"
    path.write_text(json.dumps(content))
    with pytest.raises(ShardError, match=r"manifest-1-of-1\.json: job\.sampling\.top_p: "):
        DataFolder(tmp_path)


@pytest.mark.parametrize("parts", [0, 10**400])
def test_a_number_of_parts_that_no_file_name_can_have_is_an_error(
    tmp_path: Path, job: Callable[..., Job], parts: int
) -> None:
    write_part(tmp_path, job(), 1, ["a"])
    path = manifest_path(tmp_path, 1, 1)
    path.write_text(path.read_text().replace('"parts": 1', f'"parts": {parts}'))
    with pytest.raises(ShardError, match=r"job\.parts: "):
        DataFolder(tmp_path)


def test_the_content_hash_depends_on_the_set_of_samples(
    tmp_path: Path, job: Callable[..., Job]
) -> None:
    def content_hash(name: str, job: Job, samples: list[str]) -> str:
        write_part(tmp_path / name, job, 1, samples)
        return DataFolder(tmp_path / name).content_hash()

    one = content_hash("one", job(), ["a", "b"])
    assert content_hash("other order", job(), ["b", "a"]) == one
    assert content_hash("fewer", job(), ["a"]) != one
    assert content_hash("others", job(), ["a", "c"]) != one
    assert content_hash("other job", job(prompts_hash="q"), ["a", "b"]) != one
    with shard_path(tmp_path / "one", 1, 1).open("ab") as file:
        file.write(b'{"id": "torn')
    assert DataFolder(tmp_path / "one").content_hash() == one
