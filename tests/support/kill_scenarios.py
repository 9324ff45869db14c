"""The processes that are killed: capture, servers (swap and roll-back), learner, and registry."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from leadout.check.result import Lossless
from leadout.engine import fail_safe, rollout
from leadout.engine.capture import Capture, FinishedRequest
from leadout.engine.capture_store import (
    INFO,
    CaptureInfo,
    SegmentWriter,
    read_info,
    segment_paths,
)
from leadout.engine.hot_swap import NotNowError
from leadout.engine.settings import load_redactor
from leadout.learn import cycle
from leadout.learn.config import LearnConfig
from leadout.learn.cycle import learn
from leadout.learn.data import copy_newest
from leadout.learn.gate import Comparison, Evidence
from leadout.registry import Registry
from leadout.sealed import Keys
from leadout.shards import Sample, Samples
from leadout.stats import Interval
from support.kills import Run, Scenario, left_behind, lines
from support.learn_world import NEW, make_world, requests, start, write_capture
from support.models import tiny_llama
from support.registry_kills import RegistryScenario, check_served
from support.replica import Replica
from support.system_calls import Say
from support.version_registry import publish


class CaptureScenario(Scenario):
    """Writes samples until the oldest are deleted, through the thread of a server."""

    name = "capture"
    target = CaptureInfo(target="a-target", target_fingerprint="ab")
    samples = 12  # of each process
    max_bytes = 4000  # of about 25 samples

    def begin(self, folder: Path, draw: random.Random) -> None:
        pass

    def work(self, folder: Path, say: Say) -> None:
        first = 1000 * os.getpid()
        traffic = folder / "capture"

        class SayingWriter(SegmentWriter):
            def add(self, sample: Sample) -> None:
                say(f"adds {sample.prompt[0]}")
                super().add(sample)
                say(f"added {sample.prompt[0]}")

        writer = SayingWriter(
            traffic, lambda: self.target, max_bytes=self.max_bytes, max_seconds=1e6
        )
        capture = Capture(
            writer,
            rate=1.0,
            redact=load_redactor(None),
            counters_path=folder / "counters.json",
        )
        for number in range(first, first + self.samples):
            answer = list(range(20 + number % 7))
            capture.offer(FinishedRequest("a", [number], answer, 0.0, datetime.now(UTC)))
        capture.close(60)

    def check(self, folder: Path, runs: list[Run]) -> None:
        traffic = folder / "capture"
        added, tried = list(lines(runs, "added")), list(lines(runs, "adds"))
        if not traffic.exists():
            assert not added
            return
        paths = segment_paths(traffic)
        samples = Samples(paths)  # an id twice is an error
        found = [str(sample.prompt[0]) for sample in samples]
        assert len(set(found)) == len(found), "a sample twice"
        assert set(found) <= set(tried), "a sample that nobody wrote"
        # The oldest are deleted, as many as the limit requires; all others are there.
        missing = [number for number in added if number not in found]
        assert missing == added[: len(missing)], f"missing: {missing}, found: {found}"
        size = sum(path.stat().st_size for path in paths)
        assert size <= self.max_bytes
        assert not missing or size > self.max_bytes // 2, f"deleted too much: {size} bytes are left"
        for path in paths:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
        assert stat.S_IMODE(traffic.stat().st_mode) == 0o700
        for path in folder.iterdir():
            if path.is_file():
                assert not any(number in path.read_text() for number in tried), path.name
        if added:
            copied = copy_newest(traffic, "ab", 10**9, folder / "copy", Keys())
            assert copied.unusable == 0
            assert len(Samples(copied.paths)) == len(found)
            shutil.rmtree(folder / "copy")

    def check_end(self, folder: Path, runs: list[Run]) -> None:
        self.check(folder, runs)
        assert len(list(lines(runs[-1:], "added"))) == self.samples
        assert read_info(folder / "capture") == self.target
        others = {path.name for path in (folder / "capture").iterdir()}
        others -= {path.name for path in segment_paths(folder / "capture")}
        assert others == {INFO}
        assert left_behind(folder) == []


class SwapScenario(Scenario):
    """Two servers swap to a version, roll it back together, and swap to a better one."""

    name = "swap"
    bad, good = 2, 3

    def __init__(self, made: Path) -> None:
        self._target = made / "target"
        tiny_llama().save_pretrained(self._target)
        registry = Registry(made / "registry")
        publish(registry, self._target, made, seed=0)
        for seed in (1, 2):
            publish(registry, self._target, made, seed=seed, parent=1, expected_length=3.0)
        registry.point_to(1, "the start")
        self._registry = registry.folder

    def begin(self, folder: Path, draw: random.Random) -> None:
        shutil.copytree(self._registry, folder / "registry")

    def work(self, folder: Path, say: Say) -> None:
        fail_safe.FIRST_RETRY_SECONDS = fail_safe.MAX_RETRY_SECONDS = 0.0
        rollout.SECONDS_BETWEEN_RECORDS = 0.0
        registry = Registry(folder / "registry")
        version = registry.require_pointer().version  # as a server does when it starts
        # The engine of each start counts its requests in a file of its own.
        replicas = [
            Replica(
                registry,
                self._target,
                folder / f"{name}-{os.getpid()}.json",
                version,
                server=name,
            )
            for name in ("here", "there")
        ]
        for each in replicas:
            each.start()

        def poll() -> None:
            for each in replicas:
                each.serve(70, 2 if each.drafter.version == self.bad else 3)
                try:
                    each.poll()
                except NotNowError as problem:
                    say(f"later {problem}")
                loaded, serving = each.engine.loaded, each.drafter.version
                mark = registry.bad_mark(serving)
                say(f"serves {loaded} {serving} {'good' if mark is None else 'marked'}")

        if registry.bad_mark(self.bad) is None and registry.require_pointer().version == 1:
            registry.point_to(self.bad, "better")
        for _ in range(6):
            if registry.bad_mark(self.bad) is None:
                poll()
        if registry.require_pointer().version != self.good:
            registry.point_to(self.good, "newer")
        for _ in range(3):
            poll()
        for each in replicas:
            each.drafter.stop()

    def check(self, folder: Path, runs: list[Run]) -> None:
        registry = Registry(folder / "registry")
        check_served(registry)
        registry.ledger()
        for state in lines(runs, "serves"):
            loaded, _, rest = state.rpartition("] ")
            serving, mark = rest.split()
            assert loaded == f"[{serving}, {serving}", f"workers run {loaded}], not {serving}"
            assert mark == "good", f"version {serving} is served although it is marked"

    def check_end(self, folder: Path, runs: list[Run]) -> None:
        self.check(folder, runs)
        registry = Registry(folder / "registry")
        assert registry.require_pointer().version == self.good
        assert list(lines(runs[-1:], "serves"))[-2:] == ["[3, 3] 3 good"] * 2
        assert registry.bad_mark(self.bad) is not None
        assert registry.versions() == [1, 2, 3]
        rolled_back = [e for e in registry.ledger() if e.event == "rolled_back"]
        assert [entry.version for entry in rolled_back] == [self.bad]
        assert left_behind(folder / "registry") == []


class LearnerScenario(Scenario):
    """A learning cycle on captured traffic: promoted, rejected, or with too little traffic."""

    name = "learner"
    outcomes = ("passed", "passed", "rejected", "undecided")

    def __init__(self, made: Path) -> None:
        self._world = make_world(made / "world", epochs=0.2)
        self._registry = start(self._world, made / "registry").folder
        self._requests = requests(NEW, 40)
        self._traffic = write_capture(made / "capture", self._world.target, self._requests)
        self._texts = [json.dumps(s.prompt, separators=(",", ":"))[1:-1] for s in self._requests]
        self._outcome = "passed"
        self._files: set[str] = set()

    def begin(self, folder: Path, draw: random.Random) -> None:
        shutil.copytree(self._registry, folder / "registry")
        shutil.copytree(self._traffic, folder / "capture")
        self._outcome = draw.choice(self.outcomes)

    def work(self, folder: Path, say: Say) -> None:
        def fake_evaluate(*_: object) -> Evidence:
            return evidence_for(self._outcome)

        cycle.evaluate = fake_evaluate
        result = learn(
            LearnConfig(
                target=str(self._world.target),
                registry=folder / "registry",
                traffic=folder / "capture",
                replay=self._world.data.folder,
                work=folder / "work",
                tokens=100,
                min_requests=5,
                base_sequences=20,
            )
        )
        assert result is not None
        say(f"decided {result.decision.verdict} {result.version}")

    def check(self, folder: Path, runs: list[Run]) -> None:
        registry = Registry(folder / "registry")
        check_served(registry)
        registry.ledger()
        for version in registry.versions():
            registry.verify(version)
        # Until the cycle is continued, what users wrote is where only the owner can read it.
        for path in self._with_text(folder):
            assert path.is_relative_to(folder / "work"), path
        if (folder / "work").exists():
            assert stat.S_IMODE((folder / "work").stat().st_mode) == 0o700

    def check_end(self, folder: Path, runs: list[Run]) -> None:
        self.check(folder, runs)
        registry = Registry(folder / "registry")
        versions, served = registry.versions(), registry.require_pointer().version
        assert served == versions[-1], f"{served} of {versions} is served"
        assert len(versions) - 1 <= len(runs)
        manifests = [registry.manifest(version) for version in versions]
        assert [each.parent for each in manifests[1:]] == versions[:-1], "a version twice"
        found = Counter((entry.event, entry.version) for entry in registry.ledger())
        for version in versions:
            for event in ("published", "promoted"):
                count = found[event, version]
                assert count == 1, f"{count} entries {event!r} of version {version}"
        if self._outcome == "passed":
            assert len(versions) > 1
        else:
            assert len(versions) == 1
            assert 1 <= found[self._outcome, None] <= len(runs)
        for manifest in manifests[1:]:
            names = set(manifest.files)
            self._files = self._files or names  # those of the first run, which was not killed
            assert names == self._files, f"files {sorted(names ^ self._files)}"
        assert not (folder / "work" / "cycle.json").exists()
        assert self._with_text(folder) == []
        assert list((folder / "work" / "run").glob("states.*")) == []
        assert left_behind(folder) == []

    def _with_text(self, folder: Path) -> list[Path]:
        """Files outside of the capture folder with a prompt of the traffic."""
        return [
            path
            for path in folder.rglob("*")
            if path.is_file()
            and not path.is_relative_to(folder / "capture")
            and any(text in path.read_text(errors="replace") for text in self._texts)
        ]


def evidence_for(outcome: str) -> Evidence:
    """What the gate decides so."""
    change = {"passed": (0.2, 0.1), "rejected": (-0.2, -0.3), "undecided": (0.2, -0.1)}[outcome]
    value, low = change

    def compared(value: float, low: float) -> Comparison:
        change = Interval(value=value, low=low, high=value + 0.1)
        before = Interval(value=2.0, low=1.9, high=2.1)
        after = Interval(value=2.4, low=2.3, high=2.5)
        return Comparison(requests=100, before=before, after=after, change=change)

    answers = Lossless(texts=1, equal_texts=1, divergences=[], largest_allowed_gap=0.0)
    base = compared(0.0, -0.01)
    return Evidence(
        findings=[], traffic=compared(value, low), base=base, first=base, lossless=answers
    )


SCENARIOS: dict[str, Any] = {
    each.name: each for each in (RegistryScenario, CaptureScenario, SwapScenario, LearnerScenario)
}


def make_scenario(name: str, made: Path) -> Scenario:
    """`made`: a folder for what all cases share."""
    kind = SCENARIOS[name]
    made.mkdir(parents=True, exist_ok=True)
    scenario: Scenario = kind() if kind is CaptureScenario else kind(made)
    return scenario
