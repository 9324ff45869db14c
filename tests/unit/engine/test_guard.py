"""A guarded command never outlives its owner, whatever becomes of either."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.processes import family_of, wait_until_gone

# A command that leaves a grandchild behind whose own parent is gone at once.
FAMILY = """
import subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
orphan = f"import subprocess; subprocess.Popen({sleeper!r}, start_new_session=True)"
subprocess.run([sys.executable, "-c", orphan])
print("ready", flush=True)
time.sleep(600)
"""

OWNER = """
import os, subprocess, sys, time
guards_end, lifeline = os.pipe()
guard = [sys.executable, "-m", "leadout.engine.child_process", str(guards_end), "--"]
family, lifetime = sys.argv[1], float(sys.argv[2])
subprocess.Popen(
    [*guard, sys.executable, "-c", family], pass_fds=(guards_end,), start_new_session=True
)
os.close(guards_end)
time.sleep(lifetime)
"""


def start_owner(lifetime: float) -> subprocess.Popen[str]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, FAMILY, str(lifetime)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    return owner


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_owner_takes_the_whole_family_along(end: signal.Signals) -> None:
    owner = start_owner(lifetime=600)
    family = family_of(owner.pid)
    assert len(family) == 4  # owner, guard, command, orphaned grandchild
    owner.send_signal(end)
    owner.wait()
    assert wait_until_gone(family, seconds=10) == []


def test_an_owner_that_returns_takes_the_whole_family_along() -> None:
    owner = start_owner(lifetime=2)
    family = family_of(owner.pid)
    assert len(family) == 4
    assert owner.wait() == 0
    assert wait_until_gone(family, seconds=10) == []


def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\ntime.sleep(600)\n"
    )
    impatient = tmp_path / "impatient.py"
    impatient.write_text(
        "import sys\nfrom leadout.engine import child_process as guard\nguard.GRACE_SECONDS = 0.5\n"
        "sys.exit(guard.main(sys.argv[1:]))\n"
    )
    guards_end, lifeline = os.pipe()
    guard = subprocess.Popen(
        [sys.executable, impatient, str(guards_end), "--", sys.executable, stubborn],
        pass_fds=(guards_end,),
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(guards_end)
    assert guard.stdout is not None
    assert guard.stdout.readline() == "ready\n"
    family = family_of(guard.pid)
    started = time.monotonic()
    os.close(lifeline)
    assert guard.wait(10) == 128 + signal.SIGKILL
    assert time.monotonic() - started >= 0.5
    assert wait_until_gone(family, seconds=1) == []


def test_the_exit_code_of_the_command_is_passed_on() -> None:
    guards_end, lifeline = os.pipe()
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    ended = subprocess.run(
        [sys.executable, "-m", "leadout.engine.child_process", str(guards_end), "--", *command],
        pass_fds=(guards_end,),
    )
    os.close(guards_end)
    os.close(lifeline)
    assert ended.returncode == 3
