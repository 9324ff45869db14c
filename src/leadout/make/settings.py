"""The settings of `leadout make`, and the error for what cannot be made as requested."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from leadout.errors import LeadoutError
from leadout.settings import Settings, SettingsError, setting
from leadout.train.config import TrainConfig

DEFAULT_HOURS = 1.0
_BUDGETS = ("minutes", "tokens", "epochs")  # of the trainer


class MakeError(LeadoutError):
    """A drafter that cannot be made as requested."""


class MakeSettings(Settings):
    command = "make"

    target: str = setting(..., "Folder or hub name of the target.", panel="argument")
    out: Path = setting(
        ..., "Folder for the drafter and all that belongs to it.", panel="Output", metavar="DIR"
    )

    hours: float | None = setting(
        None,
        f"Time for everything, measurements included. [default: {DEFAULT_HOURS:g}]",
        panel="Budget",
        gt=0,
    )
    tokens: int | None = setting(
        None,
        "Answer tokens to train on, repetitions included; instead of --hours.",
        panel="Budget",
        ge=1,
    )

    prompts: tuple[str, ...] = setting(
        (),
        "Prompts like your traffic, as `leadout data` takes them: a .jsonl or .parquet file, a "
        "Hugging Face dataset, or self:N. Can be repeated. [default: self:N, with an N that the "
        "budget allows]",
        panel="Training",
        metavar="SOURCE",
    )
    max_new_tokens: int | None = setting(
        None, "Maximum length of an answer, as in `leadout data`.", panel="Training", ge=1
    )
    max_length: int | None = setting(
        None, "Maximum length of prompt and answer together.", panel="Training", ge=8
    )
    thinking: bool | None = setting(
        None,
        "Thinking mode of the chat template, as it will be served. Default: the template's own.",
        panel="Training",
    )
    train_config: Path | None = setting(
        None,
        "YAML file with settings of `leadout train`, except its budget.",
        panel="Training",
        metavar="FILE",
    )

    max_batch: int = setting(
        16, "Largest number of concurrent requests to measure.", panel="Measurements", ge=1
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto",
        "Precision to serve in: auto, bfloat16, float16 or float32.",
        panel="Measurements",
        metavar="DTYPE",
    )
    max_model_len: int | None = setting(
        None,
        "Maximum length of a request to serve, as vLLM's flag of this name. Default: the target's.",
        panel="Measurements",
        ge=8,
    )
    quick: bool = setting(
        False,
        "Check on few texts and tune with few rounds: sooner, but less certain.",
        panel="Measurements",
    )
    anyway: bool = setting(
        False,
        "Go on even if a drafter of this budget is not expected to pay on this machine.",
        panel="Budget",
    )

    vllm_flags: tuple[str, ...] = setting((), "Flags for every vLLM engine.", panel="hidden")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hours is not None and self.tokens is not None:
            raise ValueError("--hours and --tokens are two budgets; give one of them.")
        if (
            self.max_new_tokens is not None
            and self.max_length is not None
            and self.max_new_tokens >= self.max_length
        ):
            raise ValueError(
                f"--max-new-tokens {self.max_new_tokens} must be less than --max-length "
                f"{self.max_length}, which includes the prompt."
            )
        return self

    @property
    def seconds(self) -> float | None:
        """The time for everything; None if tokens are the budget."""
        if self.tokens is not None:
            return None
        return 3600 * (DEFAULT_HOURS if self.hours is None else self.hours)

    def training(self) -> TrainConfig:
        """The settings of the trainer, without a budget."""
        given: dict[str, object] = {}
        if self.max_length is not None:
            given["max_length"] = self.max_length
        config = TrainConfig.resolve(given, self.train_config)
        for name in _BUDGETS:
            if getattr(config, name) is not None:
                raise SettingsError(
                    f"{self.train_config}: {name} is a budget of `leadout train`; `leadout make` "
                    "has its own, --hours or --tokens. Remove it from the file."
                )
        if self.dtype == "float32" and "precision" not in config.model_fields_set:
            config = config.model_copy(update={"precision": "float32"})
        return config
