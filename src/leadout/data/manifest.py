"""What a data folder contains: the job that made it, its settings, and counts by source."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from leadout.files import read_text, write_text
from leadout.shards import Samples, ShardError


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Sampling(_Record):
    """How answers are sampled: a share of them greedily, the others at a temperature."""

    greedy_share: float
    temperature: float
    top_p: float
    max_new_tokens: int
    max_length: int
    samples_per_prompt: int
    seed: int


class Job(_Record):
    """Everything that determines the answers; equal in all parts of a job."""

    target: str
    target_fingerprint: str
    tokenizer_hash: str
    template_hash: str
    thinking: bool | None
    sources: list[str]
    prompts_hash: str
    limit: int | None
    dtype: str
    sampling: Sampling
    parts: int


class Count(_Record):
    samples: int
    prompt_tokens: int
    response_tokens: int

    def plus(self, prompt_tokens: int, response_tokens: int) -> Count:
        return Count(
            samples=self.samples + 1,
            prompt_tokens=self.prompt_tokens + prompt_tokens,
            response_tokens=self.response_tokens + response_tokens,
        )


NONE = Count(samples=0, prompt_tokens=0, response_tokens=0)


class Manifest(_Record):
    """One part of a job."""

    job: Job
    part: int  # 1..parts
    complete: bool
    counts: dict[str, Count]  # by source
    skipped: int  # conversations that are too long, or for which the target wrote no user turn
    versions: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            return cls.model_validate_json(read_text(path))
        except ValidationError as problem:
            first = problem.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ShardError(
                f"{path}: {field or 'file'}: {first['msg']}. Expected a manifest that `leadout "
                "data` wrote."
            ) from None

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.model_dump_json(indent=2) + "\n")


def manifest_path(folder: Path, part: int, parts: int) -> Path:
    return folder / f"manifest-{part}-of-{parts}.json"


def shard_path(folder: Path, part: int, parts: int) -> Path:
    return folder / f"samples-{part}-of-{parts}.jsonl"


class DataFolder:
    """A folder written by `leadout data`, in one or several parts."""

    def __init__(self, folder: Path) -> None:
        found = sorted(folder.glob("manifest-*.json"))
        if not found:
            problem = "contains no manifest-*.json" if folder.exists() else "does not exist"
            raise ShardError(f"{folder} {problem}; expected a folder written by `leadout data`.")
        self.folder = folder
        self.manifests = [Manifest.read(path) for path in found]
        self.job = self.manifests[0].job
        for path, manifest in zip(found, self.manifests, strict=True):
            if manifest.job != self.job:
                raise ShardError(
                    f"{path}: belongs to another job than {found[0].name}. Use one folder per job."
                )
        shards = (shard_path(folder, m.part, self.job.parts) for m in self.manifests)
        self.shards = [path for path in shards if path.exists()]

    def samples(self) -> Samples:
        return Samples(self.shards)

    @property
    def response_tokens(self) -> int:
        counts = (count for manifest in self.manifests for count in manifest.counts.values())
        return sum(count.response_tokens for count in counts)

    def content_hash(self) -> str:
        """A hash of the job and its set of samples, recorded in what is made from this data."""
        total = 0  # a sum: a resumed run has the same lines in another order
        for path in self.shards:
            with path.open("rb") as lines:
                for line in lines:
                    if line.endswith(b"\n"):
                        total += int.from_bytes(hashlib.sha256(line).digest())
        content = total % 2**256
        return hashlib.sha256(f"{self.job.model_dump_json()} {content}".encode()).hexdigest()
