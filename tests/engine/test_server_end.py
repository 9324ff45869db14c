"""However a server ends, nothing of it is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leadout.engine import server
from leadout.engine.child_process import EngineError
from leadout.engine.server import Server, server_command
from support.processes import family_of, new_processes, wait_until_gone
from support.tiny_chat import write_tiny_chat_target


def test_server_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    before = family_of(os.getpid())
    failing = Server(server_command(tmp_path / "no-such-model", []), log=tmp_path / "log")
    with pytest.raises(EngineError, match="no-such-model"), failing:
        pass
    assert new_processes(before) == []


def test_a_server_that_does_not_end_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "STOP_SECONDS", 0.5)
    # It ignores SIGTERM: the guard waits for it longer than its owner waits for the guard.
    stays = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('ready', flush=True); time.sleep(600)"
    )
    running = Server([sys.executable, "-c", stays], log=tmp_path / "log")
    running.start()
    guard = running._guard
    assert guard is not None
    while "ready" not in running.log.read_text():
        assert guard.poll() is None
        time.sleep(0.1)
    running.stop()
    assert "has not ended after" in caplog.text
    assert f"process {guard.pid} goes on" in caplog.text
    guard.wait(60)  # which kills it after its grace


# Starts a server and stays, like a test run or a command that needs one.
OWNER = """
import sys
from pathlib import Path
from leadout.engine.server import Server, server_command
target, log, *flags = sys.argv[1:]
with Server(server_command(target, flags), log=Path(log)):
    print("healthy", flush=True)
    sys.stdin.read()
"""


def test_killing_its_owner_leaves_no_server_behind(tmp_path: Path) -> None:
    target = write_tiny_chat_target(tmp_path / "target")
    flags = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "128")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, target, tmp_path / "log", *flags],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},  # as users run it
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "healthy\n"
        family = family_of(owner.pid)
        assert any("EngineCore" in process.command for process in family), family
        owner.send_signal(signal.SIGKILL)
    assert wait_until_gone(family, seconds=600) == []
