"""Runs a reader on thousands of damaged inputs, in a process with bounded memory and time.

A reader may return something or raise a `LeadoutError` with a message that a terminal can show.
Anything else is a loss: another exception, a message of many lines or thousands of characters,
more than `MAX_SECONDS` of processor time, more than `MAX_MIB` of memory, and the end of the
process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leadout.errors import LeadoutError
from support.mutations import MUTATIONS, Mutate

MAX_SECONDS = 1.0
MAX_MIB = 200
BLOCKED_SECONDS = 600  # without any processor time: it waits for something
MAX_MESSAGE = 2000  # characters
CASES_PER_PROCESS = 20_000
_WARM_UP = 20  # reads of the valid sample, until all modules are loaded and all caches filled


@dataclass(frozen=True)
class Reader:
    """One reader of a file or of a reply."""

    name: str
    file: str  # in the folder, the one that is damaged
    kind: str  # of MUTATIONS
    write: Callable[[Path], object]  # a valid sample, into a folder
    read: Callable[[Path], object]  # what is in the folder
    is_file: bool = True  # False: only the content comes from outside
    is_tolerant: bool = False  # treats what is damaged as missing


def put(name: str, content: str | bytes | dict[str, Any]) -> Callable[[Path], object]:
    text = json.dumps(content) if isinstance(content, dict) else content
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / name).write_bytes(data)


def write_lines(path: Path, *records: Any) -> None:
    path.write_text("".join(f"{each.model_dump_json()}\n" for each in records))


@dataclass
class Outcomes:
    """What happened in a number of cases."""

    counts: Counter[str] = field(default_factory=Counter)
    losses: list[dict[str, Any]] = field(default_factory=list)
    slowest: float = 0.0  # seconds of processor time
    grown_mib: float = 0.0  # the largest process, beyond its size before the first case

    @property
    def cases(self) -> int:
        return self.counts.total()

    @property
    def lost(self) -> int:
        return self.cases - self.counts["read"] - self.counts["refused"]

    def lose(self, case: int, kind: str, problem: str) -> None:
        self.counts[kind] += 1
        if len(self.losses) < 20:
            self.losses.append({"case": case, "kind": kind, "problem": problem[:2000]})

    def add(self, other: Outcomes) -> None:
        self.counts += other.counts
        self.losses = [*self.losses, *other.losses][:20]
        self.slowest = max(self.slowest, other.slowest)
        self.grown_mib = max(self.grown_mib, other.grown_mib)


def _folder(path: Path) -> None:
    path.mkdir()


def _unreadable(path: Path) -> None:
    path.symlink_to("/proc/self/mem")  # a regular file whose first bytes give EIO, also for root


def _sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


# What can be under a file's name instead of the file.
FAULTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "a folder": _folder,
    "a dangling link": lambda path: path.symlink_to(path.parent / "nothing"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a named pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "unreadable": _unreadable,
    "a terabyte of nothing": lambda path: _sparse(path, 1 << 40),
    "megabytes of nothing": lambda path: _sparse(path, 63 << 20),
    "megabytes of brackets": lambda path: path.write_bytes(b"[" * (20 << 20)),
    "megabytes of digits": lambda path: path.write_bytes(b"9" * (20 << 20)),
    "thousands of lines": lambda path: path.write_bytes(b"\n" * (64 << 10)),
}


class Cases:
    """The damaged inputs of one reader by number; the first ones are those of `FAULTS`."""

    def __init__(self, reader: Reader, folder: Path, max_seconds: float = MAX_SECONDS) -> None:
        self.reader, self._folder, self._max_seconds = reader, folder, max_seconds
        folder.mkdir(parents=True)
        reader.write(folder)
        self._path = folder / reader.file
        self._valid = self._path.read_bytes()
        self._mutate: Mutate = MUTATIONS[reader.kind](self._valid)
        self._faults = list(FAULTS) if reader.is_file else []
        reader.read(folder)  # the sample itself must be read

    def warm_up(self) -> None:
        for number in range(_WARM_UP):
            self._path.write_bytes(self._valid)
            self.reader.read(self._folder)
            self._outcome(len(self._faults) + number)

    def run(self, case: int, outcomes: Outcomes) -> None:
        kind, problem, seconds = self._outcome(case)
        outcomes.slowest = max(outcomes.slowest, seconds)
        if seconds > self._max_seconds:
            kind, problem = "too slow", f"{seconds:.1f} s ({kind})"
        if kind in ("read", "refused"):
            outcomes.counts[kind] += 1
        else:
            outcomes.lose(case, kind, problem)

    def content(self, case: int) -> bytes:
        """The input of a case that is not one of the faults."""
        return self._mutate(random.Random(f"{self.reader.name} {case}"))

    def _outcome(self, case: int) -> tuple[str, str, float]:
        if case < len(self._faults):
            self._remove()
            FAULTS[self._faults[case]](self._path)
        else:
            self._path.write_bytes(self.content(case))
        started = time.process_time()
        kind, problem = self._read()
        seconds = time.process_time() - started
        if case < len(self._faults):
            self._remove()
        return kind, problem, seconds

    def _read(self) -> tuple[str, str]:
        try:
            self.reader.read(self._folder)
        except LeadoutError as problem:
            message = str(problem)
            if not message.isprintable() or len(message) > MAX_MESSAGE:
                return "message", ascii(message)
            return "refused", ""
        except MemoryError:
            return "too much memory", traceback.format_exc(limit=-3)
        except BaseException:
            return "untyped", traceback.format_exc(limit=-4)
        return "read", ""

    def _remove(self) -> None:
        if self._path.is_dir() and not self._path.is_symlink():
            shutil.rmtree(self._path)
        else:
            self._path.unlink(missing_ok=True)


def run_bounded(
    reader: Reader, folder: Path, first: int, end: int, max_seconds: float = MAX_SECONDS
) -> Outcomes:
    """The cases from `first` to `end` - 1 in child processes; `folder` must not exist."""
    outcomes = Outcomes()
    while first < end:
        last = min(end, first + CASES_PER_PROCESS)
        found, first = _run_child(reader, folder, first, last, max_seconds)
        outcomes.add(found)
    return outcomes


def _run_child(
    reader: Reader, folder: Path, first: int, end: int, max_seconds: float
) -> tuple[Outcomes, int]:
    """What one process finds out, and the next case."""
    context = multiprocessing.get_context("fork")
    shutil.rmtree(folder, ignore_errors=True)
    current = context.Value("q", first, lock=False)
    ours, theirs = context.Pipe(duplex=False)
    given = (reader, folder, max_seconds, end, current, theirs)
    child = context.Process(target=_child, args=given)
    child.start()
    theirs.close()
    outcomes = Outcomes()
    while True:
        try:
            outcomes = ours.recv()  # all that the process has found so far
        except EOFError:
            break
    child.join()
    shutil.rmtree(folder, ignore_errors=True)
    if child.exitcode == 0:
        return outcomes, end
    case = current.value
    if case < first:
        raise RuntimeError(f"{reader.name}: the process ended before its first case")
    missing = case - first - outcomes.cases  # since the last report; all of them ended well
    outcomes.counts["read"] += max(missing, 0)
    outcomes.lose(case, "process ended", f"exit code {child.exitcode}")
    return outcomes, case + 1


def _child(
    reader: Reader, folder: Path, max_seconds: float, end: int, current: Any, pipe: Any
) -> None:
    first, current.value = current.value, -1
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    cases = Cases(reader, folder, max_seconds)
    cases.warm_up()
    size = _status("VmSize")
    limit = int((size + MAX_MIB) * 2**20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    outcomes = Outcomes()
    before, told = _status("VmHWM"), 0
    for case in range(first, end):
        current.value = case
        signal.alarm(BLOCKED_SECONDS)
        cases.run(case, outcomes)
        if outcomes.lost != told:  # a loss may be the last thing that this process says
            told = outcomes.lost
            pipe.send(outcomes)
    signal.alarm(0)
    outcomes.grown_mib = _status("VmHWM") - before
    pipe.send(outcomes)


def _status(name: str) -> float:
    """A size of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(name)
