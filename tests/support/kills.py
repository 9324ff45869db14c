"""Kills a process at random system calls, starts it again, and checks what is left.

A `Scenario` says what the process does and what must hold: `check` right after every kill, when
only other processes see the files, and `check_end` after the process was started once more and has
finished.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from leadout.errors import LeadoutError
from support.system_calls import Call, Fault, Kill, Run, Say, no_fault, run

MAX_KILLS = 2  # of one case: also the process that cleans up after a kill is killed
KILL_AGAIN = 0.4  # probability
TEMPORARY = ".partial"  # in the names of files and folders that are being written


class Scenario(ABC):
    """A process that works in a folder, the same way at every start."""

    name: str

    @abstractmethod
    def begin(self, folder: Path, draw: random.Random) -> None:
        """Fill the folder of a new case."""

    @abstractmethod
    def work(self, folder: Path, say: Say) -> None:
        """What the process does; it says what it is about to do and what it has done."""

    @abstractmethod
    def check(self, folder: Path, runs: list[Run]) -> None:
        """AssertionError if the last of the runs, which was killed, has left anything wrong."""

    @abstractmethod
    def check_end(self, folder: Path, runs: list[Run]) -> None:
        """AssertionError if anything is wrong after the last run has finished."""


@dataclass
class Tally:
    """Kill points, and what was wrong after them."""

    kills: int = 0
    restarts: int = 0
    calls: set[str] = field(default_factory=set)  # names of the system calls that were killed at
    problems: list[str] = field(default_factory=list)


class KillAt:
    """Kills at the n-th change of a file; a write arrives in part."""

    def __init__(self, number: int, share: float) -> None:
        self._left, self._share = number, share

    def __call__(self, call: Call) -> Fault | None:
        self._left -= call.is_change
        return Kill(self._share) if self._left == 0 and call.is_change else None


def kill_at_random(
    scenario: Scenario, folder: Path, seed: int, kills: int, seconds: float = math.inf
) -> Tally:
    """At least so many kills, each at a system call that is drawn from all of an unkilled run.

    Ends earlier when so many seconds have passed.
    """
    tally, draw = Tally(), random.Random(f"{scenario.name} {seed}")
    changes, end = _changes(scenario, folder, draw), time.monotonic() + seconds
    while tally.kills < kills and time.monotonic() < end:
        _fresh(folder)
        scenario.begin(folder, draw)
        runs: list[Run] = []
        try:
            for _ in range(MAX_KILLS):
                at, share = draw.randint(1, changes), draw.choice((0.0, draw.random()))
                runs.append(_run(scenario, folder, KillAt(at, share)))
                if runs[-1].ending != "killed":
                    break
                tally.kills += 1
                assert runs[-1].fault_at is not None
                tally.calls.add(runs[-1].fault_at.name)
                scenario.check(folder, runs)
                if draw.random() > KILL_AGAIN:
                    break
            tally.restarts += len(runs)
            if runs[-1].ending == "killed":
                runs.append(_run(scenario, folder))
            assert runs[-1].ending == "done", f"{runs[-1].ending}: {runs[-1].error}"
            scenario.check_end(folder, runs)
        except (AssertionError, LeadoutError, OSError) as problem:
            killed = ", ".join(str(each.fault_at) for each in runs if each.fault_at is not None)
            tally.problems.append(f"{scenario.name}, killed at {killed}: {problem!r}")
    return tally


def _changes(scenario: Scenario, folder: Path, draw: random.Random) -> int:
    """The number of kill points of a run that is not killed."""
    _fresh(folder)
    scenario.begin(folder, draw)
    whole = _run(scenario, folder)
    assert whole.ending == "done", whole.error
    scenario.check_end(folder, [whole])
    return whole.changes


def _run(scenario: Scenario, folder: Path, decide: KillAt | None = None) -> Run:
    def work(say: Say) -> None:
        scenario.work(folder, say)

    expected = (OSError, LeadoutError)
    return run(work, folder, decide or no_fault, expected, changes_only=True)


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def lines(runs: list[Run], first_word: str) -> Iterator[str]:
    """The rest of every said line that starts with a word."""
    for each in runs:
        for line in each.said:
            word, _, rest = line.partition(" ")
            if word == first_word:
                yield rest


def left_behind(folder: Path) -> list[str]:
    """Temporary files and folders that were not removed."""
    found = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(name for name in found if TEMPORARY in name)
