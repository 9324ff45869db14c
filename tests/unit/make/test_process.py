"""Real child processes: their lines, results and exit codes, and how they are stopped."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from leadout.make.process import Command, reason, run_program, size_of
from support.processes import family_of, wait_until_gone

SAVES = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
print("leadout data: working", file=sys.stderr, flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(130)
"""


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command([], tmp_path / "logs" / "data.log", tmp_path / "logs" / "data.json")


def python(code: str, *words: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, words)]


def test_lines_result_and_exit_code(command: Command) -> None:
    code = (
        "import sys\n"
        "print('leadout data: answers 1/2, 0:00:03 left', file=sys.stderr)\n"
        "print('WARNING of a library', file=sys.stderr)\n"
        "print('{}')\n"
        "sys.exit(3)"
    )
    lines: list[str] = []
    assert run_program(python(code), command, lines.append) == 3
    assert lines == ["answers 1/2, 0:00:03 left"]
    assert command.result.read_text() == "{}\n"
    assert "WARNING of a library" in command.log.read_text()


def test_a_command_whose_time_is_over_saves_too(command: Command, tmp_path: Path) -> None:
    limited = replace(command, seconds=5.0)
    assert run_program(python(SAVES, tmp_path / "saved"), limited, lambda _: None) == 130
    assert (tmp_path / "saved").read_text() == "saved"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As in a terminal: shells start background jobs, such as a test run, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_lets_the_command_save(command: Command, tmp_path: Path) -> None:
    def stop(_: str) -> None:  # as soon as it works
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    before = family_of(os.getpid())
    with pytest.raises(KeyboardInterrupt):
        run_program(python(SAVES, tmp_path / "saved"), command, stop)
    assert (tmp_path / "saved").read_text() == "saved"
    left = [each for each in family_of(os.getpid()) if each not in before]
    assert wait_until_gone(left, 10) == []


def test_reasons(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("error: old.\nleadout data: x\nerror: no space.\nLast lines of y:\n  z\n")
    assert reason(log, 2) == "no space.\nLast lines of y:\n  z"
    log.write_text("Traceback\nKeyError: 1\n")
    assert reason(log, 2).startswith("it ended with exit code 2.\nTraceback")
    assert reason(tmp_path / "none", 130) == "it was interrupted"


def test_a_log_has_earlier_attempts(tmp_path: Path) -> None:
    log = tmp_path / "stage.log"
    assert size_of(log) == 0
    log.write_text("error: earlier, with ü.\n")
    since = size_of(log)
    log.write_text(log.read_text() + "error: later.\n")
    assert reason(log, 2, since) == "later."
