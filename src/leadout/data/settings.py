"""Settings of `leadout data`, and the sampling that they mean for a target.

Reasoning models get other defaults: sampled answers with the target's own settings (greedy
reasoning tends to repeat itself without an end), and lengths in which their answers end.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import ValidationError, model_validator

from leadout.data.manifest import Sampling, SamplingOptions
from leadout.errors import shortened, shown
from leadout.files import FileError, read_object
from leadout.settings import Settings, SettingsError, setting

_SHARD = re.compile(r"([0-9]{1,6})/([0-9]{1,6})", re.ASCII)
_PLACE = "Prompts and output"
_ANSWER_SHARE = 0.8  # of the maximum length at most, where only that is given
_PROMPT_SPACE = 2048  # beside the longest answer, where only the length of answers is given


class _Defaults(NamedTuple):
    greedy_share: float
    temperature: float
    top_p: float
    max_new_tokens: int
    max_length: int


PLAIN = _Defaults(0.5, 0.7, 1.0, 512, 2048)
REASONING = _Defaults(0.0, 0.6, 0.95, 8192, 10240)


class DataSettings(Settings):
    """One part of a data job: which prompts the target answers, how, and where answers go."""

    command = "data"

    target: str = setting(..., "Folder or hub name of the target.", panel="argument")
    prompts: tuple[str, ...] = setting(
        ...,
        "A .jsonl or .parquet file, a Hugging Face dataset (owner/name[:split]), or self:N to let "
        "the target write N prompts. Can be repeated.",
        panel=_PLACE,
        metavar="SOURCE",
    )
    limit: int | None = setting(
        None, "Maximum number of prompts from each source.", panel=_PLACE, ge=1
    )
    out: Path = setting(
        ..., "Folder for the samples and their manifest.", panel=_PLACE, metavar="DIR"
    )
    shard: str = setting(
        "1/1",
        "Generate part i of n only, to split a job over n machines.",
        panel=_PLACE,
        metavar="I/N",
    )

    samples: int = setting(1, "Answers per prompt.", panel="Sampling", ge=1)
    greedy_share: float | None = setting(
        None,
        "Share of the answers that are greedy; at most one per prompt. Default: "
        f"{PLAIN.greedy_share}, for reasoning models {REASONING.greedy_share:g}.",
        panel="Sampling",
        ge=0,
        le=1,
    )
    temperature: float | None = setting(
        None,
        "Temperature of the answers that are not greedy. Default: "
        f"{PLAIN.temperature}, for reasoning models that of their generation_config.json, or "
        f"{REASONING.temperature}.",
        panel="Sampling",
        ge=0.01,
    )
    top_p: float | None = setting(
        None,
        "Top-p of the answers that are not greedy; values below 1 are slow on CPUs. Default: "
        f"{PLAIN.top_p:g}, for reasoning models that of their generation_config.json, or "
        f"{REASONING.top_p}.",
        panel="Sampling",
        ge=0.01,
        le=1,
    )
    sampling_options: str | None = setting(
        None,
        "Further sampling parameters of vLLM as JSON, for example "
        '\'{"top_k": 20, "min_p": 0.05}\'.',
        panel="Sampling",
        metavar="JSON",
        flag="--sampling",
    )
    max_new_tokens: int | None = setting(
        None,
        f"Maximum length of an answer. Default: {PLAIN.max_new_tokens}, for reasoning models "
        f"{REASONING.max_new_tokens}.",
        panel="Sampling",
        ge=1,
    )
    max_length: int | None = setting(
        None,
        f"Maximum length of prompt and answer together. Default: {PLAIN.max_length}, for "
        f"reasoning models {REASONING.max_length}.",
        panel="Sampling",
        ge=8,
    )
    thinking: bool | None = setting(
        None,
        "Thinking mode of the chat template, as it will be served. Default: the template's own.",
        panel="Sampling",
    )
    chat_template_kwargs: str | None = setting(
        None,
        "Further variables of the chat template as JSON, for example "
        '\'{"reasoning_effort": "high"}\'.',
        panel="Sampling",
        metavar="JSON",
    )
    seed: int = setting(0, "Random seed.", panel="Sampling")

    concurrency: int = setting(
        128, "Requests in flight at a time, in each server.", panel="Engine", ge=1
    )
    dtype: str = setting("auto", "Data type of the target's weights.", panel="Engine")
    vllm_flags: tuple[str, ...] = setting((), "Flags of `vllm serve`.", panel="hidden")

    endpoint: tuple[str, ...] = setting(
        (),
        "Address of a vLLM server that serves the target, for example http://gpu1:8000, instead "
        "of an engine in this process. Can be repeated.",
        panel="Servers",
        metavar="URL",
    )
    served_model: str | None = setting(
        None,
        "The target's name in these servers. Default: the one that they serve, if it is called "
        "like the target.",
        panel="Servers",
        metavar="NAME",
    )
    answer_seconds: float = setting(
        1800.0,
        "After this time without an answer, a request is sent to another server.",
        panel="Servers",
        gt=0,
    )
    patience_seconds: float = setting(
        1800.0, "Stop after this time without an answer from any server.", panel="Servers", gt=0
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (
            self.max_new_tokens is not None
            and self.max_length is not None
            and self.max_new_tokens >= self.max_length
        ):
            raise ValueError(
                f"--max-new-tokens {self.max_new_tokens} must be less than --max-length "
                f"{self.max_length}, which includes the prompt."
            )
        match = _SHARD.fullmatch(self.shard)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(
                f"--shard: got {self.shard!r}, expected i/n with 1 <= i <= n, for example 2/4."
            )
        if len({*map(server_root, self.endpoint)}) < len(self.endpoint):
            raise ValueError("--endpoint: the same server is given twice. Name each of them once.")
        for url in self.endpoint:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
                raise ValueError(
                    f"--endpoint: got {url!r}, expected an address such as http://gpu1:8000."
                )
        if self.endpoint and (self.vllm_flags or self.dtype != "auto"):
            what = "--dtype" if self.dtype != "auto" else f"vLLM's flags ({self.vllm_flags[0]})"
            raise ValueError(
                f"{what} cannot be combined with --endpoint: start the servers with them instead."
            )
        if self.served_model is not None and not self.endpoint:
            raise ValueError("--served-model requires --endpoint.")
        _options_of(self.sampling_options)
        _json_object("--chat-template-kwargs", self.chat_template_kwargs)
        return self

    @property
    def part(self) -> int:
        return int(self.shard.partition("/")[0])

    @property
    def parts(self) -> int:
        return int(self.shard.partition("/")[2])

    @property
    def template_options(self) -> dict[str, Any]:
        return _json_object("--chat-template-kwargs", self.chat_template_kwargs)

    def sampling(self, target: Path, reasons: bool) -> Sampling:
        """What these settings mean for a target; `reasons` says whether it writes its reasoning."""
        defaults = REASONING if reasons else PLAIN
        own = _generation_config(target) if reasons else {}
        max_length, max_new_tokens = self._lengths(defaults, target)
        options = _options_of(self.sampling_options)
        given = options.model_dump(exclude_unset=True)
        advised = {name: own[name] for name in ("top_k", "min_p") if name in own}
        if options.min_tokens > max_new_tokens:
            raise SettingsError(
                f"--sampling: min_tokens is {options.min_tokens}, expected at most "
                f"--max-new-tokens, {max_new_tokens}."
            )
        return Sampling(
            greedy_share=_first(self.greedy_share, defaults.greedy_share),
            temperature=_first(self.temperature, own.get("temperature"), defaults.temperature),
            top_p=_first(self.top_p, own.get("top_p"), defaults.top_p),
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            samples_per_prompt=self.samples,
            seed=self.seed,
            options=SamplingOptions.model_validate(advised | given),
        )

    def _lengths(self, defaults: _Defaults, target: Path) -> tuple[int, int]:
        if self.max_length is not None:
            longest = self.max_length
        else:
            longest = defaults.max_length
            if self.max_new_tokens is not None:
                longest = max(longest, self.max_new_tokens + _PROMPT_SPACE)
            longest = min(longest, _max_positions(target) or longest)
        new = self.max_new_tokens
        if new is None:
            new = max(1, min(defaults.max_new_tokens, int(longest * _ANSWER_SHARE)))
        if new >= longest:
            raise SettingsError(
                f"--max-new-tokens {new} must be less than the maximum length {longest}, which "
                "includes the prompt. Set --max-length, or a smaller --max-new-tokens."
            )
        return longest, new


def server_root(url: str) -> str:
    """The address of a server, with or without /v1 and a slash at its end, without both."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _first(*values: Any) -> float:
    return float(next(value for value in values if value is not None))


def _json_object(flag: str, text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{flag}: {shortened(str(problem))}; expected a JSON object.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{flag}: got {shown(text)}, expected a JSON object.")
    return found


def _options_of(text: str | None) -> SamplingOptions:
    found = _json_object("--sampling", text)
    for name in ("temperature", "top_p", "seed"):
        if name in found:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"--sampling: {name} has its own flag, {flag}.")
    try:
        return SamplingOptions.model_validate(found)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = ", ".join(SamplingOptions.model_fields)
            raise ValueError(f"--sampling: {name} is not one of {known}.") from None
        raise ValueError(f"--sampling: {name}: {first['msg']}.") from None


def _generation_config(target: Path) -> Mapping[str, Any]:
    """The sampling parameters that a model was published with."""
    found = _read_object(target / "generation_config.json")
    usable: dict[str, Callable[[float], bool]] = {
        "temperature": lambda value: 0 < value < math.inf,  # 0: greedy
        "top_p": lambda value: 0 < value <= 1,
        "top_k": lambda value: isinstance(value, int) and value >= 0,  # negative: all tokens
        "min_p": lambda value: 0 <= value <= 1,
    }
    return {
        name: value
        for name, is_usable in usable.items()
        if isinstance(value := found.get(name), int | float) and is_usable(value)
    }


def _max_positions(target: Path) -> int | None:
    config = _read_object(target / "config.json")
    text = config.get("text_config")
    nested = text.get("max_position_embeddings") if isinstance(text, dict) else None
    found = config.get("max_position_embeddings", nested)
    return found if isinstance(found, int) else None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except FileError:
        return {}
