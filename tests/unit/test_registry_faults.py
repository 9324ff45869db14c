"""System calls that fail, and writers at the same time, leave a registry complete.

`experiments/registry_faults.py` and `experiments/registry_history.py` have the large numbers.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from leadout.registry import Registry
from leadout.storage import FolderStorage
from support.registry_faults import OPERATIONS, fail_each_call, make_drafter
from support.registry_history import (
    Checked,
    Done,
    check_history,
    make_registry,
    order_problem,
    read_history,
    write_history,
)
from support.system_calls import needs_tracing

pytestmark = needs_tracing

SOME = ("record", "bad_mark")
WRITERS, OPERATIONS_OF_EACH = 3, 60


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return make_drafter(tmp_path / "drafter")


def test_each_system_call_may_fail(drafter: Path, tmp_path: Path, nightly: bool) -> None:
    chosen = [each for each in OPERATIONS if nightly or each.name in SOME]
    found = fail_each_call(drafter, tmp_path / "registry", chosen)
    assert found.problems == []
    assert found.cases > 80
    assert {"write", "close", "fsync", "read", "flock"} <= set(found.by_call)


def test_a_reader_that_takes_an_error_for_an_empty_registry_is_noticed(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FolderStorage.read

    def fake_read(self: FolderStorage, name: str, *arguments: int) -> object:
        try:
            return read(self, name, *arguments)
        except Exception:
            return None

    monkeypatch.setattr(FolderStorage, "read", fake_read)
    mark = [each for each in OPERATIONS if each.name == "bad_mark"]
    found = fail_each_call(drafter, tmp_path / "registry", mark)
    assert any("WrongAnswerError" in problem for problem in found.problems)


def history(folder: Path, drafter: Path) -> Checked:
    """What writers in as many processes did, checked."""
    logs = [folder / f"{writer}.log" for writer in range(WRITERS)]
    make_registry(folder / "registry", drafter)
    writers = [
        multiprocessing.get_context("fork").Process(
            target=write_history,
            args=(folder / "registry", drafter, log, writer, OPERATIONS_OF_EACH, 0),
        )
        for writer, log in enumerate(logs)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    done = [one for log in logs for one in read_history(log)]
    return check_history(Registry(folder / "registry"), done)


def test_several_writers_with_faults_lose_nothing(drafter: Path, tmp_path: Path) -> None:
    checked = history(tmp_path, drafter)
    assert checked.problems == []
    assert checked.operations == WRITERS * OPERATIONS_OF_EACH
    assert checked.lost_updates == checked.marked_served == 0


def move(began: float, end: float, only_from: int, to: int, answer: str = "ok") -> Done:
    return Done("move", to, began, end, only_from, answer=answer, found=to)


def read(began: float, end: float, found: int) -> Done:
    return Done("read", found, began, end, found=found)


def test_histories_that_have_an_order() -> None:
    assert order_problem([move(0, 1, 1, 5), read(2, 3, 5)]) is None
    # At the same time: the second one happened first.
    assert order_problem([move(0, 9, 5, 6), move(1, 8, 1, 5), read(9, 10, 6)]) is None
    # One that failed has happened, or not.
    assert order_problem([move(0, 1, 1, 5, "unknown"), read(2, 3, 5)]) is None
    assert order_problem([move(0, 1, 1, 5, "unknown"), read(2, 3, 1)]) is None
    back = Done("roll_back", 5, 2, 3, found=3)
    refused = move(4, 5, 3, 5, "marked")
    assert order_problem([move(0, 1, 1, 5), back, refused, read(6, 7, 3)]) is None


def test_histories_that_have_none() -> None:
    # Both moved it from version 1: the update of one is lost.
    assert order_problem([move(0, 5, 1, 5), move(1, 6, 1, 6), read(7, 8, 6)]) is not None
    # Read before it was written, and not seen after it was.
    assert order_problem([read(0, 1, 5), move(2, 3, 1, 5)]) is not None
    assert order_problem([move(0, 1, 1, 5), read(2, 3, 1)]) is not None
    # An operation that failed does not happen after its end.
    late = [move(0, 1, 1, 5, "unknown"), read(2, 3, 1), read(4, 5, 5)]
    assert order_problem(late) is not None
    # Pointed to after it was rolled back.
    back = Done("roll_back", 5, 0, 1)
    assert order_problem([back, move(2, 3, 1, 5)]) is not None
