"""The folder that a data job fills: identity of the job, counts by source, its samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from leadout.files import FileError, read_lines, read_model, write_text
from leadout.shards import Sample, Samples, ShardError

# Of a job's parts. Bounded, because it is part of file names.
PartNumber = Annotated[int, Field(ge=1, le=1_000_000)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingOptions(_Record):
    """Further sampling parameters, by their names in vLLM; the defaults change nothing."""

    # Of sampled answers only.
    top_k: int = Field(default=0, ge=0)  # 0: all tokens
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, le=2)
    # Of all answers.
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: list[int] = Field(default=[])
    allowed_token_ids: list[int] | None = Field(default=None, min_length=1)
    bad_words: list[str] = Field(default=[])
    logit_bias: dict[int, float] | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0)

    def of(self, *, greedy: bool) -> dict[str, Any]:
        """The parameters that differ from their defaults, for greedy or for sampled answers."""
        given = self.model_dump(exclude_defaults=True)
        return {name: given[name] for name in given if not greedy or name not in _OF_SAMPLED}


_OF_SAMPLED = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class Sampling(_Record):
    """How answers are sampled: a share of them greedily, the others at a temperature."""

    greedy_share: float
    temperature: float
    top_p: float
    max_new_tokens: int
    max_length: int
    samples_per_prompt: int
    seed: int
    options: SamplingOptions = SamplingOptions()


class Job(_Record):
    """Everything that determines the answers; equal in all parts of a job."""

    target: str
    target_fingerprint: str
    tokenizer_hash: str
    template_hash: str
    thinking: bool | None
    template_options: dict[str, Any] = Field(default={})  # chat_template_kwargs
    sources: list[str]
    prompts_hash: str
    limit: int | None
    dtype: str
    sampling: Sampling
    parts: PartNumber


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


class DataError(_Record):
    """A line of the error file: a prompt, or a row of a prompt file, without an answer."""

    id: str  # of the sample, or file and line
    reason: str


class Manifest(_Record):
    """One part of a job."""

    job: Job
    part: PartNumber  # 1..parts
    complete: bool
    counts: dict[str, Count]  # by source
    skipped: int  # conversations that are too long, or for which the target wrote no user turn
    shortened: int = 0  # samples whose conversation was cut from the front to fit
    failed: int = 0  # conversations that ended with an error; `--resume` tries them again
    # Rows of all prompt sources that were left out: repeated ones, and those that cannot be used.
    duplicates: int = 0
    rejected: int = 0
    versions: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            return read_model(path, cls)
        except FileError as problem:
            raise ShardError(f"{problem} Expected a manifest that `leadout data` wrote.") from None

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.model_dump_json(indent=2) + "\n")


def manifest_path(folder: Path, part: int, parts: int) -> Path:
    return folder / f"manifest-{part}-of-{parts}.json"


def errors_path(folder: Path, part: int, parts: int) -> Path:
    return folder / f"errors-{part}-of-{parts}.jsonl"


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

    def samples(self, each: Callable[[Sample], None] = lambda _: None) -> Samples:
        """All samples; `each` is called once with every sample while they are indexed."""
        return Samples(self.shards, each)

    @property
    def response_tokens(self) -> int:
        counts = (count for manifest in self.manifests for count in manifest.counts.values())
        return sum(count.response_tokens for count in counts)

    def content_hash(self) -> str:
        """A hash of the job and its set of samples, recorded in what is made from this data."""
        total = 0  # a sum: a resumed run has the same lines in another order
        for path in self.shards:
            for line in read_lines(path):
                if line.endswith(b"\n"):
                    total += int.from_bytes(hashlib.sha256(line).digest())
        # Without fields at their defaults: a new field does not change the hash of earlier data.
        content = f"{self.job.model_dump_json(exclude_defaults=True)} {total % 2**256}"
        return hashlib.sha256(content.encode()).hexdigest()
