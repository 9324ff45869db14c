"""The work folder of learning cycles: who uses it, which cycle is unfinished, and what is removed.

    work/
      lock
      cycle.json     the settings of the cycle; written once the text is complete
      download/      captured segments from an object store
      capture/       captured segments as they were when the cycle began
      mix/           the text to train and evaluate on
      run/           the training run
      candidate/     the drafter that the gate evaluates
      base/          states of replayed data, for cycles on served states

All but `base` can contain what users wrote, so the folder is readable by the owner only. However a
cycle ends, also if it is killed, the text and the target's states of it are removed. An interrupted
cycle continues nevertheless: it selects the same text from the captured traffic again, from the
lines that were there when it began. Cycles on served states have no text in files at all.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leadout.files import InvalidFileError, MissingFileError, Timeout, lock, read_model
from leadout.learn.config import CycleSettings, LearnError, Record
from leadout.train.config import TrainConfig
from leadout.train.run import STATES, WORK

CYCLE = "cycle.json"
LOCK = "lock"

MAX_REMOVER_SECONDS = 30.0
# Waits until the learner has ended and its lock is free, which may be a moment later. If the next
# learner has it by then, that one is responsible for the text.
_REMOVER = """
import fcntl, pathlib, shutil, signal, sys, time
for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(each, signal.SIG_IGN)  # a supervisor sends them to all processes at once
sys.stdin.buffer.read()
with open(sys.argv[1], "a") as lock:
    for _ in range(600):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.1)
            continue
        for text in map(pathlib.Path, sys.argv[2:]):
            try:
                shutil.rmtree(text) if text.is_dir() else text.unlink(missing_ok=True)
            except OSError as problem:
                print(f"{text} cannot be deleted: {problem}", file=sys.stderr)
        break
"""


class CycleFile(Record):
    """Everything a cycle depends on; an interrupted cycle continues only if it is unchanged."""

    number: int
    parent: int
    parent_fingerprint: str
    target_fingerprint: str
    traffic: str
    replay: str
    config: CycleSettings
    training: TrainConfig  # derived from the rest and from measured speed
    segments: dict[str, int]  # of the captured traffic: lines that were read, by the file's name
    mix_hash: str  # of the text that was selected


class WorkFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mix = folder / "mix"
        self.download = folder / "download"
        self.capture = folder / "capture"
        self.run = folder / WORK
        self.states = self.run / STATES
        self.candidate = folder / "candidate"
        self.base = folder / "base"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclusive use of the folder; the lock is released when the process ends."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            # The remover of a cycle that was killed holds the lock for a moment.
            held = lock(self.folder / LOCK, seconds=MAX_REMOVER_SECONDS).acquire()
        except Timeout:
            raise LearnError(
                f"--work {self.folder} is in use by another cycle. Wait until it ends, or choose "
                "another folder."
            ) from None
        with held, self._removed_if_killed():
            try:
                yield
            finally:
                self.remove_text()

    @contextmanager
    def _removed_if_killed(self) -> Iterator[None]:
        """Another process removes what users wrote if this one ends without doing so."""
        texts = (self.mix, self.download, self.capture, self.states, self.states_marks)
        remover = subprocess.Popen(
            [sys.executable, "-I", "-c", _REMOVER, str(self.folder / LOCK), *map(str, texts)],
            stdin=subprocess.PIPE,  # the kernel closes it when this process ends
            start_new_session=True,  # what kills this process spares the remover
        )
        try:
            yield
        finally:
            remover.kill()
            remover.communicate()

    def interrupted_cycle(self) -> CycleFile | None:
        """The cycle that has not been finished, if there is one."""
        try:
            return read_model(self.folder / CYCLE, CycleFile)
        except (MissingFileError, InvalidFileError):  # none, or of another version of Leadout
            return None

    def mix_hash(self) -> str:
        digest = hashlib.sha256()
        for path in sorted(self.mix.glob("*.jsonl")):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()

    def clear(self) -> None:
        """Remove everything of an earlier cycle."""
        (self.folder / CYCLE).unlink(missing_ok=True)
        for part in (self.mix, self.download, self.capture, self.run, self.candidate):
            remove_folder(part)
        self.run.mkdir(mode=0o700)

    def finish(self) -> None:
        """Keep the candidate and the log of the run, and nothing that users wrote."""
        (self.folder / CYCLE).unlink(missing_ok=True)
        self.remove_text()

    def remove_text(self) -> None:
        """Remove what users wrote, and the target's states of it."""
        for part in (self.mix, self.download, self.capture):
            remove_folder(part)
        for path in (self.states, self.states_marks):
            path.unlink(missing_ok=True)

    @property
    def states_marks(self) -> Path:
        return self.states.with_suffix(".marks")


def remove_folder(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as problem:
        raise LearnError(
            f"{problem.filename or folder} cannot be deleted: {problem.strerror}. It may contain "
            "what users wrote: delete it by hand."
        ) from None
