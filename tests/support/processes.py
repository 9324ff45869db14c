"""Commands as users type them, and following the processes that a test started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from leadout.engine.child_process import descendants


def leadout(*words: object, codes: Collection[int] = (0,)) -> str:
    """What a `leadout` command prints; it must end with one of the exit codes."""
    command = [sys.executable, "-m", "leadout", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode in codes, ended.stderr[-3000:]
    return ended.stdout


@dataclass(frozen=True)
class Process:
    """A process, told apart from a later one with the same id by its start time."""

    pid: int
    started: str
    command: str = field(compare=False)  # some change it, such as those that run tests

    def is_alive(self) -> bool:
        return _look_at(self.pid) == self


def family_of(pid: int) -> list[Process]:
    """The living processes that come from `pid`, itself included."""
    seen = [_look_at(member) for member in (pid, *descendants(pid))]
    return [process for process in seen if process is not None]


def new_processes(before: list[Process]) -> list[Process]:
    """Those of this process that are not among the earlier ones, which may end at any time."""
    return [process for process in family_of(os.getpid()) if process not in before]


def wait_until_gone(processes: list[Process], seconds: float) -> list[Process]:
    """Wait for these processes to end; returns those still there at the deadline."""
    deadline = time.monotonic() + seconds
    while (left := [p for p in processes if p.is_alive()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _look_at(pid: int) -> Process | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()
    if state == "Z":  # ended, waiting only to be collected
        return None
    return Process(pid, started=rest[18], command=command.decode(errors="replace").strip())
