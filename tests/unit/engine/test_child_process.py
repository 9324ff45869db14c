"""Child processes: requests and results, failures and logs, and no process that outlives us."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from pydantic import BaseModel

from leadout.engine.child_process import (
    GUARD_REMOVES,
    Child,
    EngineError,
    ending,
    exact_environment,
    run_module,
)
from support.processes import family_of, wait_until_gone


class Number(BaseModel):
    value: int


DIVIDER = """
import os, sys
from pydantic import BaseModel
from leadout.engine.child_process import answer_requests
from leadout.errors import NEGATIVE, LeadoutError

class Number(BaseModel):
    value: int

class RefusedError(LeadoutError):
    exit_code = NEGATIVE

def divide(request, report):
    print("noise on stdout", flush=True)
    os.system("echo noise of a library")
    report("halfway")
    if request.value < 0:
        raise RefusedError("negative numbers are refused")
    result = Number(value=84 // request.value)
    report("nearly done")
    return result

if __name__ == "__main__":
    answer_requests(Number, divide)
    sys.exit(int(os.environ.get("EXIT_CODE", 0)))
"""


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def divider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that divides 84 by a number, refuses negative ones and dies of 0."""
    (tmp_path / "divider.py").write_text(DIVIDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "divider"


def test_progress_and_result_arrive(divider: str, temporary_files: Path) -> None:
    progress: list[str] = []
    assert run_module(divider, Number(value=2), Number, progress.append) == Number(value=42)
    assert progress == ["halfway", "nearly done"]
    assert list(temporary_files.iterdir()) == []


def test_one_child_answers_many_requests(divider: str, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    with Child(divider, log) as child:
        assert child.call(Number(value=2), Number) == Number(value=42)
        with pytest.raises(EngineError, match=r"^negative numbers are refused$") as refused:
            child.call(Number(value=-1), Number)
        assert child.call(Number(value=4), Number) == Number(value=21)
    assert refused.value.exit_code == 1  # that of the error in the child
    noise = log.read_text()
    assert noise.count("noise on stdout") == noise.count("noise of a library") == 3


def test_a_child_that_dies_is_an_error_with_the_end_of_its_log(divider: str) -> None:
    progress: list[str] = []
    with pytest.raises(EngineError) as died:
        run_module(divider, Number(value=0), Number, progress.append)
    assert progress == ["halfway"]
    assert "exit code 1" in str(died.value)
    assert "ZeroDivisionError" in str(died.value)
    log = re.search(r"Last lines of (\S+):", str(died.value))
    assert log is not None
    assert "noise on stdout" in Path(log[1]).read_text()


def test_a_child_that_fails_after_its_result_loses_nothing(
    divider: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EXIT_CODE", "3")
    assert run_module(divider, Number(value=2), Number) == Number(value=42)
    (warning,) = caplog.messages
    assert "ended with exit code 3, after its result" in warning
    log = Path(warning.rpartition(" ")[2])
    assert "noise on stdout" in log.read_text()


@pytest.mark.parametrize("code", [-9, 137])
def test_a_child_that_the_kernel_killed_names_the_likely_cause(code: int) -> None:
    assert ending(code).startswith(f"was killed (exit code {code}), most likely because the memory")
    assert ending(1) == "ended with exit code 1"


def test_a_child_that_never_answers_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "silent.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with Child("silent", tmp_path / "log") as child:
        started = time.monotonic()
        with pytest.raises(EngineError, match=r"did not answer within 0\.5 s"):
            child.call(Number(value=1), Number, seconds=0.5)
    assert time.monotonic() - started < 600  # not the hour of the child


def test_a_child_does_not_inherit_the_ranks_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_torchrun = (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"),
    )
    for name in of_torchrun:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    (tmp_path / "environment.py").write_text(
        "import json, os\nprint('result ' + json.dumps(dict(os.environ)))\ninput()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    found = run_module("environment", Number(value=1), Environment)
    assert not set(of_torchrun) & set(found.model_extra or {})
    assert (found.model_extra or {})["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_float32_is_not_rounded_to_tf32_where_results_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    assert exact_environment("bfloat16") == {}
    assert exact_environment("float32") == {"TRITON_F32_DEFAULT": "ieee"}
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32x3")
    assert exact_environment("float32") == {"TRITON_F32_DEFAULT": "tf32x3"}


class Environment(BaseModel, extra="allow"):
    pass


def test_a_child_ends_with_its_killed_parent(divider: str, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(DIVIDER.replace('report("halfway")', SLEEP))
    parent = (
        "from pydantic import BaseModel\nfrom leadout.engine.child_process import run_module\n"
        "class Number(BaseModel): value: int\n"
        "run_module('sleeper', Number(value=1), Number, lambda text: print(text, flush=True))\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "asleep\n"
    family = family_of(owner.pid)
    assert len(family) == 2
    owner.kill()
    owner.wait()
    assert wait_until_gone(family, seconds=600) == []


SLEEP = 'report("asleep"); import time; time.sleep(3600)'

# A command with a grandchild whose own parent exits at once.
FAMILY = """
import subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(3600)"]
orphan = f"import subprocess; subprocess.Popen({sleeper!r}, start_new_session=True)"
subprocess.run([sys.executable, "-c", orphan])
print("ready", flush=True)
time.sleep(3600)
"""

OWNER = """
import os, subprocess, sys
read_end, lifeline = os.pipe()
guard = [sys.executable, "-m", "leadout.engine.child_process", str(read_end), "--"]
subprocess.Popen(
    [*guard, sys.executable, "-c", sys.argv[1]], pass_fds=(read_end,), start_new_session=True
)
os.close(read_end)
sys.stdin.read()
"""


def start_owner() -> subprocess.Popen[str]:
    """It returns when its standard input ends."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, FAMILY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    return owner


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_guard_stops_everything_when_its_owner_is_killed(end: signal.Signals) -> None:
    owner = start_owner()
    family = family_of(owner.pid)
    assert len(family) == 4  # owner, guard, command, orphaned grandchild
    owner.send_signal(end)
    owner.wait()
    assert wait_until_gone(family, seconds=600) == []


def test_the_guard_stops_everything_when_its_owner_returns() -> None:
    owner = start_owner()
    family = family_of(owner.pid)
    assert len(family) == 4
    assert owner.stdin is not None
    owner.stdin.close()
    assert owner.wait() == 0
    assert wait_until_gone(family, seconds=600) == []


def test_the_guard_kills_a_command_that_ignores_sigterm(tmp_path: Path) -> None:
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\ntime.sleep(3600)\n"
    )
    impatient = tmp_path / "impatient.py"
    impatient.write_text(
        "import sys\nfrom leadout.engine import child_process as guard\nguard.GRACE_SECONDS = 0.5\n"
        "sys.exit(guard.main(sys.argv[1:]))\n"
    )
    read_end, lifeline = os.pipe()
    guard = subprocess.Popen(
        [sys.executable, impatient, str(read_end), "--", sys.executable, stubborn],
        pass_fds=(read_end,),
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(read_end)
    assert guard.stdout is not None
    assert guard.stdout.readline() == "ready\n"
    family = family_of(guard.pid)
    started = time.monotonic()
    os.close(lifeline)
    assert guard.wait(600) == 128 + signal.SIGKILL
    assert time.monotonic() - started >= 0.5
    assert wait_until_gone(family, seconds=600) == []


def test_the_guard_passes_on_the_exit_code_and_removes_a_folder_at_the_end(tmp_path: Path) -> None:
    read_end, lifeline = os.pipe()
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "file").touch()
    code = f"import os; assert {GUARD_REMOVES!r} not in os.environ; raise SystemExit(3)"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(
        [sys.executable, "-m", "leadout.engine.child_process", str(read_end), "--", *command],
        pass_fds=(read_end,),
        env={**os.environ, GUARD_REMOVES: str(tmp_path / "states")},
    )
    os.close(read_end)
    os.close(lifeline)
    assert ended.returncode == 3
    assert not (tmp_path / "states").exists()
