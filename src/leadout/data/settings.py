"""The settings of `leadout data`, and the sampling parameters that follow from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Self

from pydantic import model_validator

from leadout.data.manifest import Sampling
from leadout.settings import Settings, setting

_SHARD = re.compile(r"([0-9]{1,6})/([0-9]{1,6})", re.ASCII)


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
