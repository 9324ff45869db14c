"""The stages of `leadout make`: the command of each, its result, and where that is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from leadout.data.manifest import manifest_path
from leadout.errors import NEGATIVE, SUCCESS, UNDECIDED
from leadout.make.plan import QUICK_TEXTS, MakePlan, StageName
from leadout.make.settings import MakeSettings
from leadout.train.command import DRAFTER
from leadout.train.export import RECORD, SETTINGS


@dataclass(frozen=True, slots=True)
class Places:
    """Files and folders of a run."""

    out: Path

    @property
    def shape(self) -> Path:
        """An untrained drafter of the planned shape, until its costs are measured."""
        return self.out / "costs" / "drafter"

    @property
    def costs(self) -> Path:
        return self.out / "costs" / "tuned.json"

    @property
    def data(self) -> Path:
        return self.out / "data"

    @property
    def manifest(self) -> Path:
        return manifest_path(self.data, 1, 1)

    @property
    def drafter(self) -> Path:
        return self.out / DRAFTER

    @property
    def record(self) -> Path:
        return self.drafter / RECORD

    @property
    def training(self) -> Path:
        """The settings of a run of the trainer, there as soon as it can be continued."""
        return self.out / SETTINGS

    @property
    def check(self) -> Path:
        return self.out / "check.json"

    @property
    def check_page(self) -> Path:
        return self.out / "check.html"

    @property
    def tuned(self) -> Path:
        return self.out / "tuned.json"

    @property
    def page(self) -> Path:
        return self.out / "report.html"

    @property
    def logs(self) -> Path:
        return self.out / "logs"


@dataclass(frozen=True, slots=True)
class Stage:
    name: StageName
    title: str
    words: list[str]  # of the command
    file: Path  # which is there once the stage is complete
    codes: Collection[int]  # of a complete stage
    keeps: bool = False  # what an interrupted attempt left is continued
    seconds: float | None = None  # at most for an attempt


def costs_stage(settings: MakeSettings, places: Places) -> Stage:
    words = ["tune", settings.target, str(places.shape), "--short"]
    words += ["--max-batch", str(settings.max_batch), "--out", str(places.costs), "--json"]
    codes = (SUCCESS, NEGATIVE)  # an untrained drafter does not pay
    return Stage(
        "costs", "costs of drafting", [*words, *server_flags(settings)], places.costs, codes
    )


def data_stage(
    settings: MakeSettings, places: Places, plan: MakePlan, seconds: float | None
) -> Stage:
    """`seconds` is what a budget leaves for it: nobody knows how long the answers are."""
    words = ["data", settings.target, "--out", str(places.data), "--dtype", settings.dtype]
    for source in plan.sources:
        words += ["--prompts", source]
    words += [] if plan.limit is None else ["--limit", str(plan.limit)]
    for flag, value in (
        ("--max-new-tokens", settings.max_new_tokens),
        ("--max-length", settings.training().max_length),  # longer text is not trained on
    ):
        words += [] if value is None else [flag, str(value)]
    words += [*_thinking(settings), "--json"]
    words += ["--resume"] if places.manifest.exists() else []
    title = "training text"
    words = _with_flags(words, settings)
    return Stage("data", title, words, places.manifest, (SUCCESS,), True, seconds)


def train_stage(settings: MakeSettings, places: Places, budget: list[str]) -> Stage:
    """`budget` is the flag of the trainer with its value."""
    words = ["train", settings.target, "--data", str(places.data), "--out", str(places.out)]
    if places.training.exists():
        words += ["--resume"]  # with the settings that it was started with
    else:
        config = settings.training()
        words += [] if settings.train_config is None else ["--config", str(settings.train_config)]
        words += ["--precision", config.precision, "--max-length", str(config.max_length)]
        words += budget
    words += ["--json"]
    title = "training"
    return Stage("train", title, _with_flags(words, settings), places.record, (SUCCESS,), True)


def check_stage(settings: MakeSettings, places: Places) -> Stage:
    words = ["check", settings.target, str(places.drafter), "--dtype", settings.dtype]
    words += ["--save", str(places.check), "--report", str(places.check_page)]
    if settings.quick:
        words += ["--texts", str(QUICK_TEXTS), "--long-context", "0"]
    words += [*_thinking(settings), "--json"]
    codes = (SUCCESS, NEGATIVE, UNDECIDED)
    return Stage("check", "check", _with_flags(words, settings), places.check, codes)


def tune_stage(settings: MakeSettings, places: Places) -> Stage:
    words = ["tune", settings.target, str(places.drafter)]
    words += ["--max-batch", str(settings.max_batch), "--out", str(places.tuned), "--json"]
    words += ["--short"] if settings.quick else []
    codes = (SUCCESS, NEGATIVE)
    return Stage("tune", "draft lengths", [*words, *server_flags(settings)], places.tuned, codes)


def server_flags(settings: MakeSettings) -> list[str]:
    """The flags of a server, as `leadout serve` takes them."""
    own = [] if settings.dtype == "auto" else ["--dtype", settings.dtype]
    if settings.max_model_len is not None:
        own += ["--max-model-len", str(settings.max_model_len)]
    return [*own, *settings.vllm_flags]


def _with_flags(words: list[str], settings: MakeSettings) -> list[str]:
    return [*words, "--", *settings.vllm_flags] if settings.vllm_flags else words


def _thinking(settings: MakeSettings) -> list[str]:
    if settings.thinking is None:
        return []
    return ["--thinking" if settings.thinking else "--no-thinking"]
