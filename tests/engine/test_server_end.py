"""However a server ends, nothing of it is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leadout.engine.child_process import EngineError
from leadout.engine.server import Server, server_command
from support.models import ROOT
from support.processes import family_of, new_processes, wait_until_gone


def test_server_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    before = family_of(os.getpid())
    failing = Server(server_command(tmp_path / "no-such-model", []), log=tmp_path / "log")
    with pytest.raises(EngineError, match="no-such-model"), failing:
        pass
    assert new_processes(before) == []


def test_killing_the_test_run_leaves_no_server_behind(smollm2: Path, tmp_path: Path) -> None:
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            f"--basetemp={tmp_path / 'run'}",
            "tests/engine/test_serve.py::test_stock_vllm_loads_the_plugin_and_answers",
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    log = tmp_path / "run" / "bare0" / "server.log"
    deadline = time.monotonic() + 1800
    while not (log.exists() and "Application startup complete" in log.read_text()):
        assert run.poll() is None, "the inner test run ended before its server was up"
        assert time.monotonic() < deadline, "the inner server did not come up"
        time.sleep(0.1)
    family = family_of(run.pid)
    assert any("EngineCore" in process.command for process in family), family
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert wait_until_gone(family, seconds=600) == []
