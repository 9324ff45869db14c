"""The folder that a cycle works in: another cycle keeps out, and one that was cut off goes on.

    work/
      lock
      cycle.json     what the cycle was asked for and how it trains; written when all else is there
      mix/           the text to train on and to judge by; gone when the cycle ends
      run/           the training run
      candidate/     the drafter that the gate judges

Everything in it may show what users wrote, so it is readable by the owner only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from leadout.checkpoints.store import replacing
from leadout.learn.config import LearnConfig, LearnError
from leadout.train.config import TrainConfig
from leadout.train.run import STATES, WORK

CYCLE = "cycle.json"
LOCK = "lock"


class CycleFile(BaseModel):
    """All that a cycle depends on; one that was cut off goes on only with the same."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parent: int
    parent_fingerprint: str
    target_fingerprint: str
    traffic: str
    replay: str
    config: LearnConfig
    training: TrainConfig

    def is_same_cycle(self, other: CycleFile) -> bool:
        """Whatever was chosen on the way."""
        return self == other.model_copy(update={"training": self.training})


class Work:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mix = folder / "mix"
        self.capture = folder / "capture"
        self.run = folder / WORK
        self.candidate = folder / "candidate"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone in this folder; the lock dies with the process."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise LearnError(
                f"--work {self.folder}: found another cycle at work in it, wanted it free; wait "
                "for its end, or give another folder"
            ) from None
        try:
            yield
        finally:
            os.close(handle)

    def cut_off(self) -> CycleFile | None:
        """The cycle that was not brought to its end, if there is one."""
        path = self.folder / CYCLE
        try:
            return CycleFile.model_validate_json(path.read_bytes())
        except (FileNotFoundError, ValidationError):  # of another version of ours
            return None

    def begin(self) -> None:
        """Leave nothing of an earlier cycle."""
        (self.folder / CYCLE).unlink(missing_ok=True)
        for part in (self.mix, self.capture, self.run, self.candidate):
            shutil.rmtree(part, ignore_errors=True)
        self.run.mkdir(mode=0o700)

    def write(self, cycle: CycleFile) -> None:
        with replacing(self.folder / CYCLE) as temporary:
            temporary.write_text(cycle.model_dump_json(indent=2) + "\n", encoding="utf-8")

    def end(self) -> None:
        """Keep the candidate and the run's log, and nothing of what users wrote."""
        (self.folder / CYCLE).unlink(missing_ok=True)
        shutil.rmtree(self.mix, ignore_errors=True)
        for path in self.run.glob(f"{Path(STATES).stem}.*"):
            path.unlink()
