"""Processes that are killed at any system call lose nothing and get in nobody's way.

`experiments/reliability_kills.py` has the large numbers.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from pathlib import Path

import pytest

from leadout.registry import LEDGER
from leadout.storage import FolderStorage
from support.kill_scenarios import make_scenario
from support.kills import KillAt, kill_at_random
from support.system_calls import Call, Fail, Kill, Run, Say, Short, needs_tracing, run

pytestmark = needs_tracing

KILLS, NIGHTLY_KILLS = 8, 200


@pytest.mark.parametrize(
    "name",
    [
        "registry",
        "capture",
        pytest.param("swap", marks=pytest.mark.nightly),
        pytest.param("learner", marks=pytest.mark.nightly),
    ],
)
def test_nothing_is_lost_by_a_kill(name: str, nightly: bool, tmp_path: Path) -> None:
    scenario = make_scenario(name, tmp_path / "made")
    kills = NIGHTLY_KILLS if nightly else KILLS
    found = kill_at_random(scenario, tmp_path / "case", seed=1, kills=kills)
    assert found.problems == []
    assert found.kills >= kills


def write_two(folder: Path) -> Run:
    def work(say: Say) -> None:
        for name in ("first", "second"):
            (folder / name).write_bytes(b"0123456789")
            say(name)

    # Each file is created, then written.
    return run(work, folder, KillAt(4, share=0.5))


def test_a_kill_leaves_what_was_done_before_and_a_part_of_a_write(tmp_path: Path) -> None:
    killed = write_two(tmp_path)
    assert killed.ending == "killed"
    assert killed.said == ["first"]
    assert (tmp_path / "first").read_bytes() == b"0123456789"
    assert (tmp_path / "second").read_bytes() == b"01234"
    assert killed.fault_at is not None
    assert (killed.fault_at.name, killed.fault_at.path) == ("write", "second")


def test_a_call_that_fails_raises_and_does_nothing(tmp_path: Path) -> None:
    def work(say: Say) -> None:
        handle = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        try:
            os.write(handle, b"0123456789")
        finally:
            os.close(handle)

    full = run(work, tmp_path, lambda call: Fail(28) if call.name == "write" else None)
    assert (full.ending, full.error) == ("raised", "OSError: [Errno 28] No space left on device")
    assert (tmp_path / "file").read_bytes() == b""
    closed = run(work, tmp_path, lambda call: Fail(5) if call.name == "close" else None)
    assert (closed.ending, closed.error) == ("raised", "OSError: [Errno 5] Input/output error")
    assert (tmp_path / "file").read_bytes() == b"0123456789"
    (tmp_path / "file").unlink()
    run(work, tmp_path, lambda call: Short(0.3) if call.name == "write" else None)
    assert (tmp_path / "file").read_bytes() == b"012"


def test_files_outside_of_the_folder_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()

    def work(say: Say) -> None:
        (tmp_path / "elsewhere").write_text("a")
        (tmp_path / "here" / "file").write_text("a")

    done = run(work, tmp_path / "here")
    assert {call.path for call in done.calls} == {"file"}


def test_a_process_that_never_ends_and_one_with_a_bug_are_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("support.system_calls.MAX_SECONDS", 2)
        assert run(lambda say: signal.pause(), tmp_path).ending == "stuck"  # type: ignore[arg-type, return-value]

    def work(say: Say) -> None:
        raise KeyError("a bug")

    crashed = run(work, tmp_path)
    assert crashed.ending == "crashed"
    assert "KeyError: 'a bug'" in crashed.error


def test_the_harness_notices_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry whose entries are not appended but written anew, as a careless one would."""

    def fake_append(self: FolderStorage, log: str, line: bytes) -> None:
        path = self.folder / log
        before = path.read_bytes() if path.exists() else b""
        path.write_bytes(b"")
        path.write_bytes(before + line)

    monkeypatch.setattr(FolderStorage, "append", fake_append)
    scenario, case = make_scenario("registry", tmp_path / "made"), tmp_path / "case"
    scenario.begin(case, random.Random(0))
    writes = itertools.count(1)

    def kill_at_the_third_entry(call: Call) -> Kill | None:
        is_entry = (call.name, call.path) == ("write", LEDGER)
        return Kill() if is_entry and next(writes) == 3 else None

    runs = [run(lambda say: scenario.work(case, say), case, kill_at_the_third_entry)]
    assert runs[0].ending == "killed"
    with pytest.raises(AssertionError, match="0 entries"):
        scenario.check(case, runs)
