"""A data job and the folder that it fills: settings, identity of the job, counts by source."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from leadout.files import read_text, write_text
from leadout.settings import Settings, setting
from leadout.shards import Samples, ShardError

_SHARD = re.compile(r"([0-9]{1,6})/([0-9]{1,6})", re.ASCII)


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


class DataSettings(Settings):
    """One part of a data job: which prompts the target answers, how, and where answers go."""

    command = "data"

    target: str = setting(..., "Folder or hub name of the target.", panel="argument")
    prompts: tuple[str, ...] = setting(
        ...,
        "A .jsonl file, a Hugging Face dataset (owner/name[:split]), or self:N to let the target "
        "write N prompts. Can be repeated.",
        panel="Prompts and output",
        metavar="SOURCE",
    )
    limit: int | None = setting(
        None, "Maximum number of prompts from each source.", panel="Prompts and output", ge=1
    )
    out: Path = setting(
        ..., "Folder for the samples and their manifest.", panel="Prompts and output", metavar="DIR"
    )
    shard: str = setting(
        "1/1",
        "Generate part i of n only, to split a job over n machines.",
        panel="Prompts and output",
        metavar="I/N",
    )

    samples: int = setting(1, "Answers per prompt.", panel="Sampling", ge=1)
    greedy_share: float = setting(
        0.5,
        "Share of the answers that are greedy; at most one per prompt.",
        panel="Sampling",
        ge=0,
        le=1,
    )
    temperature: float = setting(
        0.7, "Temperature of the answers that are not greedy.", panel="Sampling", ge=0.01
    )
    top_p: float = setting(
        1.0,
        "Top-p of the answers that are not greedy. Values below 1 are slow on CPUs.",
        panel="Sampling",
        ge=0.01,
        le=1,
    )
    max_new_tokens: int = setting(512, "Maximum length of an answer.", panel="Sampling", ge=1)
    max_length: int = setting(
        2048, "Maximum length of prompt and answer together.", panel="Sampling", ge=8
    )
    thinking: bool | None = setting(
        None,
        "Thinking mode of the chat template, as it will be served. Default: the template's own.",
        panel="Sampling",
    )
    seed: int = setting(0, "Random seed.", panel="Sampling")

    concurrency: int = setting(128, "Requests in flight at a time.", panel="Engine", ge=1)
    dtype: str = setting("auto", "Data type of the target's weights.", panel="Engine")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_new_tokens >= self.max_length:
            raise ValueError(
                f"--max-new-tokens {self.max_new_tokens} must be less than --max-length "
                f"{self.max_length}, which includes the prompt."
            )
        match = _SHARD.fullmatch(self.shard)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(
                f"--shard: got {self.shard!r}, expected i/n with 1 <= i <= n, for example 2/4."
            )
        return self

    @property
    def part(self) -> int:
        return int(self.shard.partition("/")[0])

    @property
    def parts(self) -> int:
        return int(self.shard.partition("/")[2])

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            greedy_share=self.greedy_share,
            temperature=self.temperature,
            top_p=self.top_p,
            max_new_tokens=self.max_new_tokens,
            max_length=self.max_length,
            samples_per_prompt=self.samples,
            seed=self.seed,
        )


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
        content = f"{self.job.model_dump_json()} {total % 2**256}"
        return hashlib.sha256(content.encode()).hexdigest()
