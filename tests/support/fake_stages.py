"""A fake runner for `leadout make`: stages write made-up results at once, and fail on demand."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from leadout.check.result import CheckResult
from leadout.control.tuned_file import Model, write_tuned
from leadout.files import write_text
from leadout.make.process import Command
from leadout.models import fingerprint
from support.drafters import TINY_DRAFTER, write_random_drafter
from support.models import ROOT
from support.tiny_data import write_data
from support.tuned_files import a_tuning

# A record of a real training; made-up ones have more fields than these tests look at.
TRAINING = ROOT / "drafters" / "smollm2-135m-instruct-dflash" / "training.json"
CONFIG = replace(TINY_DRAFTER, target_num_layers=6)


@dataclass
class FakeStages:
    """Call it as a runner."""

    target: Path
    check: CheckResult
    odds: Sequence[float] = (0.9,) * 4  # of the drafts of the trained drafter
    per_draft: float = 0.05  # bare steps that verifying a draft costs
    # What happens instead of a stage, by its name; it returns the exit code.
    instead: dict[str, Callable[[Command], int]] = field(default_factory=dict)
    ran: list[Command] = field(default_factory=list)

    def __call__(self, command: Command, follow: Callable[[str], None]) -> int:
        self.ran.append(command)
        follow("working")
        command.log.parent.mkdir(parents=True, exist_ok=True)
        command.log.touch()
        name = self.name_of(command)
        if name in self.instead:
            return self.instead[name](command)
        code: int = getattr(self, f"_{name}")(command)
        return code

    @staticmethod
    def name_of(command: Command) -> str:
        return command.log.stem

    @property
    def names(self) -> list[str]:
        return [self.name_of(command) for command in self.ran]

    def _costs(self, command: Command) -> int:
        drafter = Path(command.words[2])
        assert (drafter / "model.safetensors").exists()
        self._tuned(command, [0.0] * 4, drafter)
        return 1

    def write_text_to(self, command: Command) -> None:
        write_data(Path(_value(command, "--out")), self.target, [])

    def _data(self, command: Command) -> int:
        self.write_text_to(command)
        return 0

    def _train(self, command: Command) -> int:
        out = Path(_value(command, "--out"))
        write_text(out / "training.yaml", "{}")
        shutil.rmtree(out / "drafter", ignore_errors=True)
        write_random_drafter(out / "drafter", CONFIG)
        shutil.copy(TRAINING, out / "drafter")
        return 0

    def _check(self, command: Command) -> int:
        write_text(Path(_value(command, "--save")), self.check.model_dump_json())
        write_text(Path(_value(command, "--report")), "written again with the costs")
        return self.check.verdict.exit_code

    def _tune(self, command: Command) -> int:
        return self._tuned(command, self.odds, Path(command.words[2]))

    def _tuned(self, command: Command, odds: Sequence[float], drafter: Path) -> int:
        target, trained = (
            Model(name=str(each), fingerprint=fingerprint(each)) for each in (self.target, drafter)
        )
        tuned = a_tuning(list(odds), per_draft=self.per_draft, target=target, drafter=trained)
        write_tuned(tuned, Path(_value(command, "--out")))
        return 0 if tuned.max_drafts else 1


def _value(command: Command, flag: str) -> str:
    return command.words[command.words.index(flag) + 1]
