"""One `leadout` command as a child process: guarded, its progress followed, stopped in order.

Every stage that starts an engine runs in a process of its own, since vLLM frees a device only when
its process ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from leadout.engine.child_process import descendants, ending, without_torchrun
from leadout.errors import INTERRUPTED
from leadout.files import read_text

# For a command to save its work after SIGINT; a step of training can take a minute.
STOP_SECONDS = 300.0
MAX_REASON = 4000  # characters of a log that an error shows
_PREFIX = "leadout "
_ERRORS = ("error: ", "Error: ")  # of our commands, and of typer for wrong usage

Follow = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Command:
    words: list[str]  # of `leadout`
    log: Path  # everything that it prints on stderr
    result: Path  # what it prints on stdout: its result as JSON
    seconds: float | None = None  # after which it is interrupted, and ends with what it has


def run_command(command: Command, follow: Follow) -> int:
    """Run it to its end and return the exit code; `follow` gets each line of progress.

    KeyboardInterrupt is passed on as SIGINT, and raised here when the command has ended.
    """
    return run_program([sys.executable, "-m", "leadout", *command.words], command, follow)


def run_program(program: Sequence[str], command: Command, follow: Follow) -> int:
    for path in (command.log, command.result):
        path.parent.mkdir(parents=True, exist_ok=True)
    guards_end, lifeline = os.pipe()
    guard = [sys.executable, "-m", "leadout.engine.child_process", str(guards_end), "--"]
    with command.result.open("wb") as result:
        process = subprocess.Popen(
            [*guard, *program],
            env=without_torchrun(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=result,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=(guards_end,),
            start_new_session=True,  # Ctrl-C reaches it through us only
        )
    os.close(guards_end)
    reader = threading.Thread(target=_read, args=(process, command.log, follow), daemon=True)
    reader.start()
    try:
        return process.wait(command.seconds)
    except (KeyboardInterrupt, subprocess.TimeoutExpired) as reason_to_stop:
        with suppress(ProcessLookupError, IndexError):
            os.kill(descendants(process.pid)[0], signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        if isinstance(reason_to_stop, KeyboardInterrupt):
            raise
        return INTERRUPTED
    finally:
        os.close(lifeline)  # the guard then stops whatever is left
        process.wait()
        reader.join()


def _read(process: subprocess.Popen[str], log: Path, follow: Follow) -> None:
    assert process.stderr is not None
    with process.stderr as lines, log.open("a", encoding="utf-8") as file:
        for line in lines:
            file.write(line)
            file.flush()
            if line.startswith(_PREFIX):  # "leadout data: answers 12/96, 0:01:30 left"
                follow(line.removeprefix(_PREFIX).partition(": ")[2].strip())


def size_of(log: Path) -> int:
    """Where the next attempt's part of a log begins."""
    return log.stat().st_size if log.exists() else 0


def reason(log: Path, code: int, since: int = 0) -> str:
    """Why a command failed, from the end of its log; the bytes before `since` are of others."""
    text = read_text(log) if log.exists() else ""
    text = text.encode()[since:].decode(errors="replace")
    lines = text.splitlines()
    starts = [place for place, line in enumerate(lines) if line.startswith(_ERRORS)]
    if starts:
        found = "\n".join(lines[starts[-1] :])
        for prefix in _ERRORS:
            found = found.removeprefix(prefix)
        return found[:MAX_REASON]
    if code == INTERRUPTED:
        return "it was interrupted"
    return f"it {ending(code)}.\n{text[-MAX_REASON:]}"
