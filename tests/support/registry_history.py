"""Histories of a registry with several writers, and whether they can be put into one order.

Each writer notes when an operation began and ended and what came of it. A history is right if there
is an order of all operations that agrees with those times, in which each one sees what the ones
before it did (Wing and Gong's test of linearizability). An operation that failed or whose process
was killed has happened at some moment before its end, or never.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from leadout.errors import LeadoutError
from leadout.registry import PointerMovedError, Registry, RegistryError
from support.registry_faults import ERRORS, can_fail
from support.system_calls import Call, Fail, Fault, Kill, Say, run

START = 1  # the version that is served at the start
ANCESTORS = (1, 2, 3)  # each the parent of the next; never rolled back
CALLS_BETWEEN_FAULTS = 2000  # an operation has about 70
KILLS = 0.2  # of the faults at calls that change something
MAX_UNFINISHED_CHECKS = 200_000  # of a history that cannot be ordered in a reasonable time


@dataclass(frozen=True)
class Done:
    """One operation of a writer; `end` and `answer` are None if its process was killed."""

    what: str  # read, move, roll_back, publish, record
    version: int
    began: float
    end: float
    only_from: int | None = None
    token: str = ""  # names the operation in the registry
    # ok, moved: the pointer named another version; marked; unknown: it failed or was killed
    answer: str = "ok"
    found: int | None = None  # the version that was read, published or pointed to


class FailOrKill:
    """Most calls that it is asked about fail, at others the process is killed."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def __call__(self, call: Call) -> Fault | None:
        if call.is_change and self._draw.random() < KILLS:
            return Kill(self._draw.random())
        error = self._draw.choice(list(ERRORS))
        return Fail(ERRORS[error]) if can_fail(call, error) else None


def make_registry(folder: Path, drafter: Path) -> None:
    registry = Registry(folder)
    for parent in (None, 1, 2):
        registry.publish(drafter, target_fingerprint="t", parent=parent)
    registry.point_to(START, "the start")


def write_history(
    folder: Path, drafter: Path, log: Path, writer: int, operations: int, seed: int
) -> int:
    """One writer, in processes that are killed and started again; returns the number of kills."""
    draw = random.Random(f"{seed} {writer}")
    random.seed(draw.random())  # the calls at which something happens
    kills = starts = 0
    while (left := operations - _count(log)) > 0:
        starts += 1
        number, count = starts, left

        def work(say: Say, number: int = number, count: int = count) -> None:
            _operate(folder, drafter, log, f"{writer}.{number}", count, f"{seed} {writer} {number}")

        found = run(work, folder, FailOrKill(draw), (), share=1 / CALLS_BETWEEN_FAULTS)
        if found.ending == "killed":
            kills += 1
            _end_killed(log)
        elif found.ending != "done":
            raise RuntimeError(f"writer {writer}: {found.ending}: {found.error}")
    return kills


def _count(log: Path) -> int:
    return log.read_bytes().count(b'"end"') if log.exists() else 0


def _end_killed(log: Path) -> None:
    """The operation that was begun and not ended ends now, with an unknown answer."""
    content = log.read_text() if log.exists() else ""
    whole = content[: content.rfind("\n") + 1]
    with log.open("w") as file:
        file.write(whole)
        begun = [json.loads(line) for line in whole.splitlines()]
        if begun and "end" not in begun[-1]:
            file.write(json.dumps({"end": time.monotonic(), "answer": "unknown"}) + "\n")


def _operate(folder: Path, drafter: Path, log: Path, name: str, operations: int, seed: str) -> None:
    registry, draw = Registry(folder), random.Random(seed)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(**line: object) -> None:
        os.write(handle, (json.dumps(line) + "\n").encode())

    seen, made = START, list(ANCESTORS)
    for number in range(operations):
        token = f"{name}.{number}"
        what = draw.choices(
            ("read", "move", "roll_back", "publish", "record"), (30, 30, 12, 3, 25)
        )[0]
        version = draw.choice(made[-8:])
        if what == "roll_back":
            later = [each for each in made if each not in ANCESTORS]
            if not later:
                what = "read"
            else:
                version = seen if seen in later else draw.choice(later[-3:])
        only_from = seen if what == "move" else None
        began = {"what": what, "version": version, "only_from": only_from, "token": token}
        note(**began, began=time.monotonic())
        answer, result = _do(registry, drafter, what, version, only_from, token)
        note(end=time.monotonic(), answer=answer, found=result)
        if what == "read" and result is not None:
            seen = result
        if answer == "moved" and result is not None:
            seen = result
        if what == "publish" and result is not None:
            made.append(result)
    os.close(handle)


def _do(
    registry: Registry, drafter: Path, what: str, version: int, only_from: int | None, token: str
) -> tuple[str, int | None]:
    try:
        if what == "read":
            return "ok", registry.require_pointer().version
        if what == "move":
            return "ok", registry.point_to(version, token, only_from=only_from).version
        if what == "roll_back":
            pointer = registry.roll_back(version, token)
            return "ok", None if pointer is None else pointer.version
        if what == "publish":
            return "ok", registry.publish(drafter, target_fingerprint="t", parent=3).version
        registry.record("swapped", version, token)
        return "ok", None
    except PointerMovedError:
        return "moved", None
    except RegistryError as problem:
        if "marked as bad" in str(problem):
            return "marked", None
        return "unknown", None
    except (OSError, LeadoutError):
        return "unknown", None


def read_history(log: Path) -> list[Done]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [Done(**begun, **ended) for begun, ended in zip(lines[::2], lines[1::2], strict=True)]


@dataclass
class Checked:
    """What a history has, and what is wrong with it."""

    operations: int = 0
    by_answer: dict[str, int] = field(default_factory=dict)
    lost_updates: int = 0
    marked_served: int = 0
    problems: list[str] = field(default_factory=list)


def check_history(registry: Registry, history: Iterable[Done]) -> Checked:
    """Compare what writers were told with what the registry holds."""
    done = sorted(history, key=lambda each: each.began)
    checked = Checked(len(done), dict(Counter(f"{each.what} {each.answer}" for each in done)))
    _check_versions(registry, done, checked)
    _check_ledger(registry, done, checked)
    _check_marks(done, checked)
    pointer = [each for each in done if each.what in ("read", "move", "roll_back")]
    now = time.monotonic()
    last = registry.require_pointer().version
    pointer.append(Done("read", last, now, now + 1, found=last))
    problem = order_problem(pointer)
    if problem is not None:
        checked.lost_updates += 1
        checked.problems.append(problem)
    return checked


def _check_versions(registry: Registry, done: list[Done], checked: Checked) -> None:
    published = [each.found for each in done if each.what == "publish" and each.answer == "ok"]
    twice = [version for version, count in Counter(published).items() if count > 1]
    if twice:
        checked.lost_updates += len(twice)
        checked.problems.append(f"versions {twice} were given twice")
    there = set(registry.versions())
    for version in published:
        if version not in there:
            checked.lost_updates += 1
            checked.problems.append(f"version {version} is lost")
    for version in there:
        registry.verify(version)


def _check_ledger(registry: Registry, done: list[Done], checked: Checked) -> None:
    found = Counter(entry.why for entry in registry.ledger())
    for each in done:
        if each.what == "record":
            allowed = (1,) if each.answer == "ok" else (0, 1)
            if found.pop(each.token, 0) not in allowed:
                checked.lost_updates += 1
                checked.problems.append(f"the entry {each} is lost or there twice")
    if found:
        checked.problems.append(f"entries that nobody wrote: {dict(found)}")


def _check_marks(done: list[Done], checked: Checked) -> None:
    """No pointer names a version that was marked before it was read or moved."""
    marked: dict[int, float] = {}
    for each in done:
        if each.what == "roll_back" and each.answer == "ok":
            marked[each.version] = min(each.end, marked.get(each.version, each.end))
    for each in done:
        if each.what == "roll_back" or each.answer != "ok" or each.found is None:
            continue
        if each.began > marked.get(each.found, float("inf")):
            checked.marked_served += 1
            checked.problems.append(f"{each}: marked since {marked[each.found]}")


# The state of the model: the pointer, and the versions that were rolled back.
State = tuple[int, frozenset[int]]


def _after(state: State, each: Done) -> State | None:
    """The state after an operation with this answer; None if it cannot have that answer."""
    pointer, marked = state
    if each.what == "read":
        return state if each.found == pointer else None
    if each.what == "move":
        return _after_move(state, each)
    new = (ANCESTORS[-1] if pointer == each.version else pointer, marked | {each.version})
    if each.answer == "unknown":
        return new
    moved = pointer == each.version
    return new if each.found == (ANCESTORS[-1] if moved else None) else None


def _after_move(state: State, each: Done) -> State | None:
    pointer, marked = state
    if each.answer == "moved":
        return state if pointer != each.only_from else None
    if each.answer == "marked":
        return state if each.version in marked else None
    if pointer != each.only_from or each.version in marked:
        return None
    return (each.version, marked)


def order_problem(done: list[Done]) -> str | None:
    """None if the operations on the pointer can be put into one order.

    Goes through beginnings and ends in the order of time with all states that are possible, each
    with the operations that have happened in it and not ended yet.
    """
    moments = sorted(
        [(each.began, 0, number) for number, each in enumerate(done)]
        + [(each.end, 1, number) for number, each in enumerate(done)]
    )
    possible: set[tuple[State, frozenset[int]]] = {((START, frozenset()), frozenset())}
    running: set[int] = set()
    for _, is_end, number in moments:
        if not is_end:
            running.add(number)
            continue
        reached: set[tuple[State, frozenset[int]]] = set()
        seen, todo = set(possible), list(possible)
        while todo:
            state, happened = todo.pop()
            if number in happened:
                reached.add((state, happened - {number}))
                continue
            if done[number].answer == "unknown":  # it may never have happened
                reached.add((state, happened))
            for other in running - happened:
                new = _after(state, done[other])
                if new is not None and (new, happened | {other}) not in seen:
                    seen.add((new, happened | {other}))
                    todo.append((new, happened | {other}))
            if len(seen) > MAX_UNFINISHED_CHECKS:
                return f"too many possible orders at {done[number]}"
        running.discard(number)
        if not reached:
            before = sorted({state[0] for state, _ in possible})
            return f"{done[number]} is impossible: the pointer was one of {before}"
        possible = reached
    return None


def as_json(checked: Checked) -> dict[str, Any]:
    return asdict(checked)
