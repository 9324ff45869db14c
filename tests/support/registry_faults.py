"""Every system call of the registry fails in turn; afterwards it is consistent and works again."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from leadout.engine.watch_record import WatchRecord, read_records, write_record
from leadout.errors import LeadoutError
from leadout.registry import Registry
from support.kills import left_behind
from support.system_calls import WRITES, Call, Fail, Fault, Run, Say, Short, run

# A full disk is an error of calls that need room, and of `close` and `fsync` where writing is
# delayed.
NEEDS_ROOM = {
    *("write", "pwrite64", "openat", "open", "mkdir", "mkdirat", "rename", "renameat", "renameat2"),
    *("sendfile", "copy_file_range", "fsync", "fdatasync", "close", "link", "linkat"),
}
ERRORS = {"EIO": errno.EIO, "ESTALE": errno.ESTALE, "ENOSPC": errno.ENOSPC}
SHARE = 0.5  # of a write that is cut short


@dataclass(frozen=True)
class Operation:
    """A public operation on a registry with three versions, of which 3 is served and 2 is marked.

    `has_happened` says whether its effect is there, completely.
    """

    name: str
    do: Callable[[Registry, Path], object]
    has_happened: Callable[[Registry], bool]


def _is_read(registry: Registry) -> bool:
    return False  # it changes nothing


RECORD = WatchRecord(server="here:8000", version=3, found="watching", checks=7)


def _recorded(registry: Registry) -> bool:
    return any(entry.why == "a test" for entry in registry.ledger())


OPERATIONS = (
    Operation(
        "publish",
        lambda registry, drafter: registry.publish(drafter, target_fingerprint="t", parent=3),
        lambda registry: len(registry.versions()) == 4,
    ),
    Operation(
        "point_to",
        lambda registry, _: registry.point_to(1, "a test", only_from=3),
        lambda registry: registry.require_pointer().version == 1,
    ),
    Operation(
        "roll_back",
        lambda registry, _: registry.roll_back(3, "a test"),
        lambda registry: (
            registry.bad_mark(3) is not None and registry.require_pointer().version == 1
        ),
    ),
    Operation(
        "mark_bad",
        lambda registry, _: registry.mark_bad(1, "a test"),
        lambda registry: registry.bad_mark(1) is not None,
    ),
    Operation("record", lambda registry, _: registry.record("swapped", 3, "a test"), _recorded),
    Operation(
        "record once",
        lambda registry, _: registry.record("promoted", 3, "a test", once=True),
        _recorded,
    ),
    Operation(
        "write_record",
        lambda registry, _: write_record(registry, RECORD),
        lambda registry: any(each.checks == RECORD.checks for each in read_records(registry, 3)),
    ),
    Operation("verify", lambda registry, _: registry.verify(3), _is_read),
    Operation("pointer", lambda registry, _: registry.require_pointer(), _is_read),
    Operation("bad_mark", lambda registry, _: _require(registry.bad_mark(2)), _is_read),
    Operation("ledger", lambda registry, _: _require(registry.ledger()), _is_read),
    Operation("good_ancestor", lambda registry, _: _require_1(registry.good_ancestor(3)), _is_read),
)


class WrongAnswerError(Exception):
    """A reader that could not read answers as if there were nothing."""


def _require(found: object) -> None:
    if not found:
        raise WrongAnswerError(repr(found))


def _require_1(version: int) -> None:
    if version != 1:
        raise WrongAnswerError(str(version))


@dataclass
class Found:
    cases: int = 0
    by_call: dict[str, int] = field(default_factory=dict)
    by_error: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class FailAt:
    """The n-th call fails; with `for_good` all calls from there on that can fail this way."""

    def __init__(self, number: int, error: str, for_good: bool) -> None:
        self._number, self._error, self._for_good = number, error, for_good

    def __call__(self, call: Call) -> Fault | None:
        if call.number != self._number and not (self._for_good and call.number > self._number):
            return None
        if self._error == "short":
            return Short(SHARE) if call.name in WRITES else None
        return Fail(ERRORS[self._error]) if can_fail(call, self._error) else None


def can_fail(call: Call, error: str) -> bool:
    if error == "short":
        return call.name in WRITES
    # `lseek` does not reach the storage.
    return call.name != "lseek" and (error != "ENOSPC" or call.name in NEEDS_ROOM)


def fail_each_call(
    drafter: Path,
    folder: Path,
    operations: Sequence[Operation] = OPERATIONS,
) -> Found:
    """Each call of each operation fails with each error, alone and with all calls after it."""
    found = Found()
    for operation in operations:
        template = folder / "template"
        shutil.rmtree(template, ignore_errors=True)
        _make(template, drafter)
        whole = _case(operation, template, folder / "case", drafter, None)
        assert whole.ending == "done", f"{operation.name}: {whole.error}"
        for call in whole.calls:
            for error in (*ERRORS, "short"):
                if not can_fail(call, error):
                    continue
                for for_good in (False, True):
                    decide = FailAt(call.number, error, for_good)
                    case = _case(operation, template, folder / "case", drafter, decide)
                    found.cases += 1
                    found.by_call[call.name] = found.by_call.get(call.name, 0) + 1
                    found.by_error[error] = found.by_error.get(error, 0) + 1
                    problem = _problem(operation, case, folder / "case", drafter)
                    if problem is not None:
                        lasting = " for good" if for_good else ""
                        what = f"{operation.name}, {error}{lasting} at {call}: {problem}"
                        found.problems.append(what)
    return found


def _make(folder: Path, drafter: Path) -> None:
    registry = Registry(folder)
    for parent in (None, 1, 1):
        registry.publish(drafter, target_fingerprint="t", parent=parent)
    registry.mark_bad(2, "slow")
    registry.point_to(3, "the start")
    registry.record("published", 3, "the start")


def _case(
    operation: Operation, template: Path, folder: Path, drafter: Path, decide: FailAt | None
) -> Run:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)

    def work(say: Say) -> None:
        operation.do(Registry(folder), drafter)

    expected = (OSError, LeadoutError)
    return run(work, folder, decide, expected) if decide else run(work, folder, expected=expected)


def _problem(operation: Operation, case: Run, folder: Path, drafter: Path) -> str | None:
    """What is wrong after a call has failed."""
    if case.ending not in ("done", "raised"):
        return f"{case.ending}: {case.error}"
    registry = Registry(folder)
    try:
        happened = operation.has_happened(registry)
        if case.ending == "done" and not happened and operation.has_happened is not _is_read:
            return "reported no error, but nothing has happened"
        _check_consistent(registry)
        if operation.has_happened is _is_read:
            operation.do(registry, drafter)
        else:  # trying again helps, and the other operations work too
            _try_again(operation, registry, drafter, happened)
        _check_consistent(registry)
        new = registry.publish(drafter, target_fingerprint="t", parent=1).version
        registry.point_to(new, "later")
        assert left_behind(folder) == [], left_behind(folder)
    except (AssertionError, LeadoutError, OSError, WrongAnswerError) as problem:
        return f"{case.ending} {case.error}; then {problem!r}"
    return None


def _try_again(operation: Operation, registry: Registry, drafter: Path, happened: bool) -> None:
    if happened and operation.name in ("publish", "point_to", "record"):
        return  # it would happen twice
    operation.do(registry, drafter)
    assert operation.has_happened(registry), "has not happened at the second time either"


def _check_consistent(registry: Registry) -> None:
    versions = registry.versions()
    assert versions[:3] == [1, 2, 3], versions
    for version in versions:
        registry.verify(version)
    served = registry.require_pointer().version
    assert registry.bad_mark(served) is None or served == 1, f"{served} is marked"
    assert registry.bad_mark(2) is not None
    entries = [entry.why for entry in registry.ledger()]
    assert entries.count("the start") == 1, entries
    assert entries.count("a test") <= 1, entries


def make_drafter(folder: Path) -> Path:
    """Files that a registry takes for a drafter."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(random.Random(0).randbytes(20_000))
    return folder
