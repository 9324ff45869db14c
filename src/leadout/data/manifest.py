"""What a data folder holds: which target answered, how it was asked, and how much came of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from leadout.files import replacing
from leadout.shards import Samples, ShardError


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Sampling(_Record):
    """How answers are drawn: a share of them greedily, the others at a temperature."""

    greedy_share: float
    temperature: float
    top_p: float
    max_new_tokens: int
    max_length: int
    samples_per_prompt: int
    seed: int


class Job(_Record):
    """All that determines the answers; every part of a job split over machines has the same."""

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
    skipped: int  # conversations that are too long, or whose user turn the target left empty
    versions: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as problem:
            first = problem.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ShardError(
                f"{path}: {field}: {first['msg']}; wanted a manifest as `leadout data` writes it"
            ) from None

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def manifest_path(folder: Path, part: int, parts: int) -> Path:
    return folder / f"manifest-{part}-of-{parts}.json"


def shard_path(folder: Path, part: int, parts: int) -> Path:
    return folder / f"samples-{part}-of-{parts}.jsonl"


class DataFolder:
    """A folder that `leadout data` has written, whole or in parts."""

    def __init__(self, folder: Path) -> None:
        found = sorted(folder.glob("manifest-*.json"))
        if not found:
            raise ShardError(
                f"{folder}: found no manifest-*.json, wanted a folder that `leadout data` wrote"
            )
        self.folder = folder
        self.manifests = [Manifest.read(path) for path in found]
        self.job = self.manifests[0].job
        for path, manifest in zip(found, self.manifests, strict=True):
            if manifest.job != self.job:
                raise ShardError(
                    f"{path}: found the settings of another job than in {found[0].name}, wanted "
                    "the same; keep each job in a folder of its own"
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
        """Of the job and the set of its samples: names this data in what is made from it."""
        total = 0  # a sum, as a run that was cut short leaves the same lines in another order
        for path in self.shards:
            with path.open("rb") as lines:
                for line in lines:
                    if line.endswith(b"\n"):
                        total += int.from_bytes(hashlib.sha256(line).digest())
        content = total % 2**256
        return hashlib.sha256(f"{self.job.model_dump_json()} {content}".encode()).hexdigest()
