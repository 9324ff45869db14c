"""An engine in a process of its own, which reads a request and writes its result.

A module that is run so reads the request as JSON from its standard input, may write progress, and
writes the result as its last line. One engine a process: vLLM's counters are the process's.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

from pydantic import BaseModel

from leadout.errors import LeadoutError

RESULT = "LEADOUT-RESULT "
PROGRESS = "LEADOUT-PROGRESS "
# What torchrun sets; vLLM would take the trainer's ranks and its meeting place for its own.
_OF_TORCHRUN = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
LOG_TAIL_LINES = 30

Report = Callable[[str], None]
Result = TypeVar("Result", bound=BaseModel)


class DecodeError(LeadoutError):
    """The engine did not get through; the message ends with its last lines."""


def run_apart(
    module: str, request: BaseModel, result: type[Result], report: Report = lambda _: None
) -> Result:
    """Run a module of this package with a request; `report` hears of its progress."""
    found: str | None = None
    said: deque[str] = deque(maxlen=LOG_TAIL_LINES)
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as asked:
        asked.write(request.model_dump_json())
        asked.seek(0)
        with subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={n: value for n, value in os.environ.items() if not n.startswith(_OF_TORCHRUN)},
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.startswith(RESULT):
                        found = line.removeprefix(RESULT)
                    elif line.startswith(PROGRESS):
                        report(line.removeprefix(PROGRESS).strip())
                    else:
                        said.append(line.rstrip("\n"))
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0 or found is None:
            errors.seek(0)
            said.extend(line.rstrip("\n") for line in errors)
            tail = "\n".join(said)
            raise DecodeError(f"vLLM ended with code {process.returncode}; its last lines:\n{tail}")
    return result.model_validate_json(found)


def say_progress(text: str) -> None:
    sys.stdout.write(f"\n{PROGRESS}{text}\n")
    sys.stdout.flush()


def say_result(result: BaseModel) -> None:
    sys.stdout.write(f"\n{RESULT}{result.model_dump_json()}\n")


# Runs a command that must not outlive its owner: `python -m leadout.engine.child_process FD --
# COMMAND`.
#
# The owner holds the write end of a pipe whose read end is FD. However the owner ends - returns,
# raises, is killed with SIGKILL - the kernel closes its end, and the guard then stops the command
# and every process that came from it. A server's own children (vLLM's engine core and workers) are
# found even when their parent is gone, because the guard is their reaper.

POLL_SECONDS = 0.1
GRACE_SECONDS = 15.0  # for a clean shutdown, before SIGKILL
PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    lifeline, separator, command = int(arguments[0]), arguments[1], arguments[2:]
    if separator != "--" or not command:
        raise SystemExit("usage: python -m leadout.engine.child_process FD -- COMMAND...")
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
