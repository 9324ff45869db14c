"""Faults on live servers, one after the other, and what must hold whatever happens.

Two replicas serve one registry behind a proxy (`chaos_traffic`) while clients ask for greedy
answers. After each fault: every answer was that of bare vLLM, no request failed but at a replica
whose engine was killed, and every server is soon on the version that the registry's pointer names.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leadout.engine.capture_store import segment_paths
from leadout.errors import LeadoutError
from leadout.files import lock
from leadout.registry import Registry
from leadout.shards import read_shard
from leadout.storage.folder import LOCK
from support.chaos_traffic import Failure, Traffic
from support.chaos_world import (
    BODY,
    TESTS,
    Disk,
    Growth,
    Replica,
    Resources,
)
from support.version_registry import WEIGHTS, publish, with_nan

CLIENTS = 8
UNREACHABLE = 3.5  # tokens per step; a random drafter is far below
SECONDS_TO_ROLL_BACK = 900.0


@dataclass(frozen=True)
class Pace:
    """How long things take."""

    slot: float  # seconds from one fault to the next, at least
    hold: float  # seconds for which a fault lasts, where that can be chosen
    limit: float = 30.0  # seconds until every server is on the pointer's version
    end_limit: float = 180.0  # seconds until a server has ended, and for other waits
    min_life: float = 600.0  # seconds; growth of processes that lived shorter says little
    max_growth: float = 0.1  # share of a process's memory
    max_descriptors: int = 16  # more at the end than after warm-up


@dataclass(frozen=True)
class Outage:
    """From the kill of an engine until its replica is ready again."""

    replica: str
    began: float
    ended: float

    def explains(self, failure: Failure) -> bool:
        return (
            failure.replica == self.replica
            and failure.ended >= self.began
            and failure.began <= self.ended
        )


@dataclass(frozen=True)
class Disturbance:
    """One fault and what came of it."""

    fault: str
    replica: str
    detail: str
    at: float  # seconds since the first fault
    seconds: float  # that the fault lasted, restart included
    seconds_to_pointer: float | None  # from its end until all servers were on the pointer's version
    version: int  # that the pointer named then
    answers: int  # during the fault and until the next one
    failed_at_killed_replica: int
    lost: list[str]  # broken promises; empty


class Chaos:
    """The replicas, and the faults that can happen to them."""

    def __init__(
        self,
        work: Path,
        disk: Disk,
        target: Path,
        expected: Sequence[tuple[list[int], list[int]]],
        pace: Pace,
        seed: int = 0,
    ) -> None:
        """`expected`: prompts with the answers of bare vLLM."""
        self.pace, self._work, self._disk = pace, work, disk
        self.target, self.expected = target, expected
        self._draw = random.Random(seed)
        self._seeds = itertools.count(1000 * (seed + 1))
        self._bad_kinds = itertools.cycle(("NaN", "another target", "a damaged file"))
        self.registry, self.capture = Registry(disk.folder / "registry"), disk.folder / "capture"
        publish(self.registry, self.target, work, seed=0)
        self.registry.point_to(1, "the start")
        self.replicas = [
            Replica(name, self.target, self.registry.folder, self.capture, work, disk)
            for name in ("a", "b")
        ]
        self.outages: list[Outage] = []
        self.disturbances: list[Disturbance] = []
        self.growth: list[Growth] = []

    def run(self, faults: Iterable[str], seconds: float | None = None) -> None:
        """One fault after the other, until there are no more or the time is over."""
        replicas = self.replicas
        with ExitStack() as stack:
            for replica in replicas:
                stack.callback(replica.stop)
                replica.start()
            for replica in replicas:
                replica.wait_until_ready()
            urls = {replica.name: replica.url for replica in replicas}
            self.traffic = stack.enter_context(Traffic(urls, BODY, self.expected, CLIENTS))
            resources = stack.enter_context(Resources(replicas))
            self._wait_for("answers of both replicas", lambda: len(self.traffic.seen.answers) == 2)
            self._started = time.monotonic()
            turns = itertools.cycle(replicas)
            for fault in faults:
                if seconds is not None and time.monotonic() - self._started > seconds:
                    break
                # One replica never restarts, so that growth over the whole run would be seen.
                replica = replicas[-1] if fault in RESTARTING else next(turns)
                self._disturb(fault, replica)
            self.growth = resources.growth(self.pace.min_life)

    def _disturb(self, fault: str, replica: Replica) -> None:
        began, seen = time.monotonic(), self.traffic.seen
        answers, changed, failed = seen.answers.total(), len(seen.changed), len(seen.failures)
        lost = []
        try:
            detail = FAULTS[fault](self, replica)
        except Exception as problem:  # whatever it is, the other faults are worth a run
            detail, lost = "broken off", [f"{type(problem).__name__}: {problem}"]
            self._repair(replica)
        ended = time.monotonic()
        seconds_to_pointer = self._seconds_to_pointer()
        while time.monotonic() - began < self.pace.slot:
            time.sleep(0.2)
        failures = seen.failures[failed:]
        lost += [f"changed answer: {each}" for each in seen.changed[changed:]]
        lost += [f"failed request: {each}" for each in failures if not self.is_explained(each)]
        if seconds_to_pointer is None or seconds_to_pointer > self.pace.limit:
            lost.append(f"not every server was on the pointer's version: {self._versions()}")
        self.disturbances.append(
            Disturbance(
                fault=fault,
                replica=replica.name,
                detail=detail,
                at=round(began - self._started, 1),
                seconds=round(ended - began, 1),
                seconds_to_pointer=seconds_to_pointer and round(seconds_to_pointer, 1),
                version=self.registry.require_pointer().version,
                answers=seen.answers.total() - answers,
                failed_at_killed_replica=sum(map(self.is_explained, failures)),
                lost=lost,
            )
        )
        print(self.disturbances[-1], flush=True)

    def is_explained(self, failure: Failure) -> bool:
        return any(outage.explains(failure) for outage in self.outages)

    def grown(self) -> list[Growth]:
        limits = self.pace.max_growth, self.pace.max_descriptors
        return [each for each in self.growth if not each.is_within(*limits)]

    def wrong_samples(self) -> tuple[int, int]:
        """Captured samples, and those among them that are not what was served.

        A request whose client has gone away is captured with the beginning of its answer.
        """
        known = {tuple(prompt): answer for prompt, answer in self.expected}
        paths = segment_paths(self.capture)
        samples = [sample for path in paths for _, sample in read_shard(path)]
        wrong = sum(
            known.get(tuple(each.prompt), [])[: len(each.response)] != each.response
            for each in samples
        )
        return len(samples), wrong

    def _versions(self) -> dict[str, int | None]:
        return {replica.name: replica.version() for replica in self.replicas}

    def _seconds_to_pointer(self) -> float | None:
        began = time.monotonic()
        while time.monotonic() - began < 4 * self.pace.limit:
            version = self.registry.require_pointer().version
            if set(self._versions().values()) == {version}:
                return time.monotonic() - began
            time.sleep(0.2)
        return None

    def _wait_for(self, what: str, is_so: Callable[[], bool], seconds: float | None = None) -> None:
        deadline = time.monotonic() + (self.pace.end_limit if seconds is None else seconds)
        while not is_so():
            if time.monotonic() > deadline:
                ledger = [str(entry) for entry in self.registry.ledger()[-10:]]
                raise AssertionError(f"waited in vain for {what}; the ledger ends with {ledger}")
            time.sleep(0.2)

    def _publish(self, **settings: Any) -> int:
        settings = {"expected_length": 1.0, "parent": self._pointed()} | settings
        seed = next(self._seeds)
        return publish(self.registry, self.target, self._work, seed=seed, **settings).version

    def _pointed(self) -> int:
        return self.registry.require_pointer().version

    def _promote(self) -> None:
        self.registry.point_to(self._publish(), "better")

    def _repair(self, replica: Replica) -> None:
        try:
            is_ready = replica.server.is_ready()
        except LeadoutError:
            is_ready = False
        if not is_ready:
            replica.stop()
            self._restart(replica)
        self.traffic.backends[replica.name].is_enabled = True
        self.registry.point_to(self._publish(parent=1), "after a fault that was broken off")

    def _restart(self, replica: Replica) -> None:
        replica.start()
        replica.wait_until_ready()
        self.traffic.backends[replica.name].is_enabled = True

    # The faults. Each returns once it is over, and says in a few words what happened.

    def stop_engine(self, replica: Replica) -> str:
        role = self._draw.choice([each for each in replica.processes if each != "server"])
        os.kill(replica.processes[role], signal.SIGSTOP)
        try:
            self._promote()
            time.sleep(self.pace.hold)
        finally:
            os.kill(replica.processes[role], signal.SIGCONT)
        return f"its {role} for {self.pace.hold:.0f} s, and a version was published meanwhile"

    def kill_engine(self, replica: Replica) -> str:
        began = time.monotonic()
        role = self._draw.choice([each for each in replica.processes if each != "server"])
        os.kill(replica.processes[role], signal.SIGKILL)
        code = replica.wait_until_ended(self.pace.end_limit)
        seconds = time.monotonic() - began
        self._promote()
        self._restart(replica)
        self.outages.append(Outage(replica.name, began, time.monotonic()))
        return f"its {role}; the server ended after {seconds:.1f} s with exit code {code}"

    def terminate(self, replica: Replica) -> str:
        began = time.monotonic()
        self._end(replica)
        seconds = time.monotonic() - began
        self._promote()
        self._restart(replica)
        return f"the server finished its requests and ended after {seconds:.1f} s"

    def _end(self, replica: Replica) -> None:
        # As Kubernetes: no new requests, the pause of preStop, then the signal.
        self.traffic.backends[replica.name].is_enabled = False
        time.sleep(1)
        os.kill(replica.processes["server"], signal.SIGTERM)
        replica.wait_until_ended(self.pace.end_limit)

    def fill_disk(self, replica: Replica) -> str:
        version, before = self._publish(), self._pointed()
        with self._disk.full():
            failed = 0
            if self._disk.is_mounted:  # then it is full for a learner, too
                failed += _fails(self._publish)
                failed += _fails(lambda: self.registry.point_to(version, "better"))
                assert self._pointed() == before
            # A server needs no space to change its drafter.
            assert replica.swap(version) == 200
            time.sleep(self.pace.hold)
        self.registry.point_to(version, "better")
        return f"for {self.pace.hold:.0f} s; {failed} writes of a learner failed, a swap did not"

    def slow_disk(self, replica: Replica) -> str:
        with self._disk.slow(1.0):
            self._promote()
            time.sleep(self.pace.hold)
        return f"each opening of a file took 1 s longer, for {self.pace.hold:.0f} s"

    def lose_disk(self, replica: Replica) -> str:
        # Long enough for several attempts in vain, each later than the one before.
        seconds = 3 * self.pace.hold
        with self._disk.stale():
            self._promote()
            time.sleep(seconds)
        return f"files of versions could not be read for {seconds:.0f} s"

    def hold_lock(self, replica: Replica) -> str:
        """A process that writes to the registry is stopped in the middle."""
        seconds = 3 * self.pace.hold
        self._promote()
        with lock(self.registry.folder / LOCK):
            time.sleep(seconds)
        return f"the lock of the registry was held for {seconds:.0f} s"

    def refuse_version(self, replica: Replica) -> str:
        kind = self._point_to_bad_version()
        return f"a version with {kind}"

    def refuse_version_and_restart(self, replica: Replica) -> str:
        kind = self._point_to_bad_version(lambda: (self._end(replica), self._restart(replica)))
        return f"a version with {kind}, and the server restarted while the pointer named it"

    def _point_to_bad_version(self, meanwhile: Callable[[], object] = lambda: None) -> str:
        kind, before = next(self._bad_kinds), self._pointed()
        if kind == "NaN":
            version = self._publish(spoil=with_nan)
        else:
            version = self._publish(other_target=kind == "another target")
        if kind == "a damaged file":
            (self.registry.path(version) / WEIGHTS).write_bytes(b"half")
        self.registry.point_to(version, "a bad one")

        def is_refused() -> bool:
            found = (entry for entry in self.registry.ledger() if entry.version == version)
            return len({e.evidence["server"] for e in found if e.event == "refused"}) == 2

        self._wait_for("two refusals", is_refused)
        meanwhile()
        assert set(self._versions().values()) == {before}
        self.registry.point_to(before, "the bad one is withdrawn")
        return kind

    def accept_less(self, replica: Replica) -> str:
        before = self._pointed()
        version = self._publish(expected_length=UNREACHABLE)
        self.registry.point_to(version, "high expected acceptance")
        self._wait_for(
            "a roll-back",
            lambda: self.registry.bad_mark(version) is not None and self._pointed() == before,
            SECONDS_TO_ROLL_BACK,
        )
        return "both servers found it, and it was rolled back"

    def kill_learner(self, replica: Replica) -> str:
        before = self._pointed()
        work = self._work / "learner"
        command = [sys.executable, "-m", "support.chaos_publisher", str(self.registry.folder)]
        command += [str(self.target), str(work), str(next(self._seeds))]
        path = f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"
        learner = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
        try:
            self._wait_for("a published version", lambda: self._pointed() != before)
            time.sleep(self._draw.uniform(0, 0.5))
        finally:
            learner.kill()
            learner.wait()
        return f"after it had published {self._pointed() - before} versions"


FAULTS: dict[str, Callable[[Chaos, Replica], str]] = {
    "engine stopped": Chaos.stop_engine,
    "disk full": Chaos.fill_disk,
    "disk slow": Chaos.slow_disk,
    "disk unreachable": Chaos.lose_disk,
    "registry locked": Chaos.hold_lock,
    "version refused": Chaos.refuse_version,
    "version accepts less": Chaos.accept_less,
    "learner killed": Chaos.kill_learner,
    "engine killed": Chaos.kill_engine,
    "server terminated": Chaos.terminate,
    "version refused, restart": Chaos.refuse_version_and_restart,
}
RESTARTING = ("engine killed", "server terminated", "version refused, restart")


def _fails(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, LeadoutError):
        return True
    return False
