"""The settings of `leadout learn`, and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, model_validator

from leadout.errors import UNDECIDED, LeadoutError
from leadout.settings import Settings, setting
from leadout.storage import Place, is_url

DEFAULT_MINUTES = 30.0


class LearnError(LeadoutError):
    """A cycle that cannot be run as requested."""


class TooLittleTrafficError(LearnError):
    """There is not enough captured traffic to train on and to evaluate on."""

    exit_code = UNDECIDED


class Record(BaseModel):
    """Base of what this package writes to files and prints as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CycleSettings(Settings):
    """How a cycle trains and what its candidate must achieve; recorded with every candidate."""

    command = "learn"

    minutes: float | None = setting(
        None,
        f"Training time in minutes. Default: {DEFAULT_MINUTES:g}, unless --tokens is given.",
        panel="Training",
        gt=0,
    )
    tokens: int | None = setting(
        None,
        "Answer tokens to train on, repetitions included; instead of --minutes.",
        panel="Training",
        ge=1,
    )
    learning_rate: float | None = setting(
        None,
        "Peak learning rate. Default: half the rate that the drafter was first trained with.",
        panel="Training",
        gt=0,
    )
    replay_share: float = setting(
        0.5, "Share of replayed data among the training sequences.", panel="Training", ge=0, lt=1
    )
    held_out: float = setting(
        0.2,
        "Share of the requests that is kept for the gate, the newest ones; at least "
        "--min-requests.",
        panel="Gate",
        gt=0,
        lt=1,
    )
    min_requests: int = setting(
        50,
        "Minimum number of requests to train on, and to evaluate on.",
        panel="Gate",
        ge=1,
        validation_alias=AliasChoices("min_requests", "least_requests"),  # as in earlier files
    )
    gain: float = setting(
        0.0,
        "Relative gain in acceptance length on held-out traffic that the lower bound of the 95% "
        "confidence interval must exceed.",
        panel="Gate",
        ge=0,
    )
    base_loss: float = setting(
        0.03,
        "Maximum relative loss on the base, by the same bound, compared with the serving version "
        "and with version 1.",
        panel="Gate",
        ge=0,
    )
    base_sequences: int = setting(
        200,
        "Sequences of the original data on which the gate measures forgetting; other ones in "
        "every cycle.",
        panel="Gate",
        ge=20,
    )

    @model_validator(mode="after")
    def _require_one_budget(self) -> Self:
        if self.minutes is not None and self.tokens is not None:
            raise ValueError("--minutes and --tokens are two budgets; give one of them.")
        return self


class _Folders(Settings):
    target: str | None = setting(
        None, "Folder or hub name of the target; not needed for --status.", panel="argument"
    )
    registry: Place = setting(
        ...,
        "Folder or s3:// URL with the versions of the drafter.",
        panel="Folders",
        metavar="PLACE",
    )
    registry_key: Path | None = setting(
        None,
        "File with the private key of the registry: sign new versions, and use signed ones only.",
        panel="Folders",
        metavar="FILE",
    )
    traffic: Place | None = setting(
        None,
        "Folder written by `leadout serve --capture`, or the URL of its --capture-upload.",
        panel="Folders",
        metavar="PLACE",
    )
    states: tuple[str, ...] = setting(
        (),
        "Folder of `leadout serve --learn-states`, or tcp://HOST:PORT of a `leadout relay`: learn "
        "from hidden states as they are served, instead of --traffic; repeatable.",
        panel="Folders",
        metavar="RING",
    )
    states_key: Path | None = setting(
        None,
        "File with the key of the relays that --states names.",
        panel="Folders",
        metavar="FILE",
    )
    capture_key: Path | None = setting(
        None,
        "File with the keys of encrypted traffic, as given to `leadout serve`. Default: the "
        "variable LEADOUT_CAPTURE_KEY, if it is set.",
        panel="Folders",
        metavar="FILE",
    )
    replay: Path | None = setting(
        None,
        "Folder written by `leadout data`: what the drafter was first trained on.",
        panel="Folders",
        metavar="DIR",
    )
    work: Path | None = setting(
        None,
        "Folder for intermediate files. Default: `work` in the registry, if that is a folder.",
        panel="Folders",
        metavar="DIR",
    )
    states_from: tuple[str, ...] = setting(
        (),
        "URL of a server of `leadout serve --states` for the target's hidden states; repeatable. "
        "Default: computed here, or by a server that is started for a quantized target or one "
        "that does not fit into memory.",
        panel="Training",
        metavar="URL",
    )
    cycles: int | None = setting(
        None,
        "With --states: end after so many cycles; 0 only computes the states of --replay. Default: "
        "go on until stopped.",
        panel="Served states",
        metavar="N",
        ge=0,
    )
    keep_gib: float = setting(
        4.0,
        "With --states: memory for served sequences in GiB; beyond it the oldest are dropped.",
        panel="Served states",
        gt=0,
    )
    replay_states: int = setting(
        1000,
        "With --states: sequences of --replay to train on whose states are computed once and kept "
        "in --work, beside those of the gate.",
        panel="Served states",
        ge=1,
    )
    nice: bool = setting(
        True,
        "With --states: run at the lowest priority, so that a server on the same machine goes "
        "first.",
        panel="Served states",
    )
    vllm_flags: tuple[str, ...] = setting((), "Flags for every vLLM engine.", panel="hidden")
    start: str | None = setting(
        None,
        "Create the registry with this drafter as version 1; trains nothing.",
        panel="Folders",
        metavar="DRAFTER",
    )


class LearnConfig(CycleSettings, _Folders):  # in this order, --help lists the folders first
    """All settings of `leadout learn`."""

    @model_validator(mode="after")
    def _require_one_source(self) -> Self:
        if self.states and self.traffic is not None:
            raise ValueError(
                "--traffic and --states are two sources of what users wrote; give one of them."
            )
        if self.cycles is not None and not self.states:
            raise ValueError("--cycles requires --states: with --traffic there is one cycle.")
        return self

    @property
    def cycle(self) -> CycleSettings:
        """Without the folders, which differ between machines."""
        return CycleSettings(**self.model_dump(include=set(CycleSettings.model_fields)))

    @property
    def work_folder(self) -> Path:
        if self.work is not None:
            return self.work
        if is_url(self.registry):
            raise LearnError(
                f"--work is required with --registry {self.registry}: name a folder of this "
                "machine for intermediate files."
            )
        return Path(self.registry) / "work"

    def required(self, name: str) -> Any:
        """The value of a setting that is optional only for --status or --start."""
        value = getattr(self, name)
        if value is None:
            raise LearnError(f"{self.flag_of(name)} is required. See `leadout learn --help`.")
        return value
