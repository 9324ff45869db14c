"""What `leadout make` has done so far: a file in its folder, from which it continues.

The file is bound to the target and the settings that it was started with. Results themselves are
the files that the stages write; a stage is done if it is recorded here and its file is there.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from leadout.errors import shortened
from leadout.files import FileError, MissingFileError, read_model, write_text
from leadout.make.expected import Expectation
from leadout.make.plan import STAGES, MakePlan, StageName
from leadout.make.settings import MakeError, MakeSettings
from leadout.provenance import redacted
from leadout.train.config import TrainConfig
from leadout.version import __version__

STATE = "make.json"
# They change where results go and whether to go on, not the results.
NOT_BOUND = frozenset({"out", "anyway"})
TARGET, CONFIG, FLAGS = "target", "train_config", "vllm_flags"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StageRecord(_Record):
    """A stage that is complete."""

    file: str  # its result, relative to the folder
    exit_code: int
    seconds: float  # of all its attempts
    ended: str  # UTC, ISO 8601
    fingerprint: str | None = None  # of the drafter, if that is the result


class MakeState(_Record):
    """The content of the file."""

    format: Literal[1] = 1
    leadout: str  # version that started it
    bound: dict[str, Any]  # target and settings, without keys
    digest: str  # of the same with keys
    stages: dict[StageName, StageRecord] = Field(default_factory=dict)
    seconds: dict[StageName, float] = Field(default_factory=dict)  # of attempts, also unfinished
    plan: MakePlan | None = None  # with measured speeds, once they are
    train_minutes: float | None = None  # what was left of the budget when training began
    expectation: Expectation | None = None

    @classmethod
    def started(cls, settings: MakeSettings, config: TrainConfig, fingerprint: str) -> Self:
        bound = settings.model_dump(mode="json", exclude=set(NOT_BOUND))
        bound |= {TARGET: fingerprint, CONFIG: config.model_dump(mode="json")}
        whole = repr(sorted(bound.items()))
        return cls(
            leadout=__version__,
            bound={**bound, FLAGS: redacted(settings.vllm_flags)},
            digest=hashlib.sha256(whole.encode()).hexdigest(),
        )

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """None: nothing was started there."""
        try:
            return read_model(folder / STATE, cls)
        except MissingFileError:
            return None
        except FileError as problem:
            raise MakeError(
                f"{problem} Expected a file that `leadout make` of this version wrote. Choose "
                "another --out, or remove the file to start anew."
            ) from None

    def write(self, folder: Path) -> None:
        write_text(folder / STATE, self.model_dump_json(indent=2) + "\n")

    def require_same(self, wanted: MakeState, folder: Path) -> None:
        """Refuse to continue with another target or other settings."""
        if self.digest == wanted.digest:
            return
        names = [
            name
            for name in (TARGET, *MakeSettings.model_fields)
            if name not in NOT_BOUND and self.bound.get(name) != wanted.bound.get(name)
        ]
        raise MakeError(
            f"--out {folder} was started with {_difference(self, wanted, names)}. One folder holds "
            "one drafter: repeat its settings to continue, or choose another --out."
        )

    def with_stage(self, name: StageName, record: StageRecord) -> Self:
        return self.model_copy(update={"stages": {**self.stages, name: record}})

    def without_stages_from(self, name: StageName) -> Self:
        """Later stages depend on the results of earlier ones."""
        kept = STAGES[: STAGES.index(name)]
        return self.model_copy(
            update={"stages": {n: r for n, r in self.stages.items() if n in kept}}
        )

    def with_seconds(self, name: StageName, seconds: float) -> Self:
        """After an attempt, complete or not."""
        spent = self.seconds.get(name, 0.0) + seconds
        return self.model_copy(update={"seconds": {**self.seconds, name: spent}})

    @property
    def spent(self) -> float:
        return sum(self.seconds.values())


def _difference(before: MakeState, now: MakeState, names: list[str]) -> str:
    if not names:  # they differ in what is not shown
        return "other keys among vLLM's flags"
    name = names[0]
    if name == TARGET:
        prints = (str(each.bound.get(TARGET))[:12] for each in (before, now))
        return "another target (fingerprint {}, now {})".format(*prints)
    flag = "other flags of vLLM" if name == FLAGS else MakeSettings.flag_of(name)
    old, new = (each.bound.get(name) for each in (before, now))
    if isinstance(old, dict) and isinstance(new, dict):  # settings of the trainer
        keys = [key for key in new if old.get(key) != new[key]]
        key = keys[0] if keys else "(something else)"
        return f"{flag} in which {key} is {_shown(old.get(key))}, not {_shown(new.get(key))}"
    return f"{flag} {_shown(old)}, not {_shown(new)}"


def _shown(value: object) -> str:
    if value is None:
        return "(not given)"
    text = " ".join(map(str, value)) or "(none)" if isinstance(value, list) else str(value)
    return shortened(text)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
