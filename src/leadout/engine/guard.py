"""Runs a command that must not outlive its owner: `python -m leadout.engine.guard FD -- COMMAND`.

The owner holds the write end of a pipe whose read end is FD. However the owner ends - returns,
raises, is killed with SIGKILL - the kernel closes its end, and the guard then stops the command
and every process that came from it. A server's own children (vLLM's engine core and workers) are
found even when their parent is gone, because the guard is their reaper.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

POLL_SECONDS = 0.1
GRACE_SECONDS = 15.0  # for a clean shutdown, before SIGKILL
PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    lifeline, separator, command = int(arguments[0]), arguments[1], arguments[2:]
    if separator != "--" or not command:
        raise SystemExit("usage: python -m leadout.engine.guard FD -- COMMAND...")
    adopt_orphans()
    stop_asked = False

    def ask_to_stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stop_asked
        stop_asked = True

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    child = subprocess.Popen(command)
    while child.poll() is None and not stop_asked:
        # Nothing is ever written to the lifeline: readable means closed by the owner.
        readable, _, _ = select.select([lifeline], [], [], POLL_SECONDS)
        stop_asked = stop_asked or bool(readable)
    end_family(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_family(child: subprocess.Popen[bytes]) -> None:
    """Ask the command to end, wait a little, then kill whatever of its family is left."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    while family := descendants(os.getpid()):
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reap()
        time.sleep(POLL_SECONDS)


def reap() -> None:
    """Collect adopted children that have ended, so that they do not stay as zombies."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def descendants(ancestor: int) -> list[int]:
    """All processes that come from `ancestor`, nearest first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "pid (name) state ppid ...": the name may hold spaces and brackets.
            after_name = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(after_name[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    generation = [ancestor]
    while generation:
        generation = [pid for parent in generation for pid in children.get(parent, [])]
        found += generation
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
