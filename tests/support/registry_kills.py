"""A process that is killed while it writes to a registry."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from leadout.engine.watch_record import WatchRecord, write_record
from leadout.registry import Registry
from support.kills import Run, Scenario, left_behind, lines
from support.registry_faults import make_drafter
from support.system_calls import Say


def check_served(registry: Registry) -> int:
    """The version that the pointer names is complete and not marked."""
    version = registry.require_pointer().version
    registry.verify(version)
    assert registry.bad_mark(version) is None, f"the pointer names {version}, which is marked"
    return version


class RegistryScenario(Scenario):
    """Publishes, points, rolls back, deletes a version that was rolled back, and records it all."""

    name = "registry"

    def __init__(self, made: Path) -> None:
        self._drafter = make_drafter(made / "drafter")

    def begin(self, folder: Path, draw: random.Random) -> None:
        registry = Registry(folder)
        registry.publish(self._drafter, target_fingerprint="t")
        registry.point_to(1, "the start")

    def work(self, folder: Path, say: Say) -> None:
        registry, process = Registry(folder), os.getpid()
        serving = registry.require_pointer().version
        say(f"points {serving}")
        say(f"pointed {serving}")

        def record(event: Any, version: int) -> None:
            why = f"{event} {version} {process}"
            say(f"records {why}")
            registry.record(event, version, why)
            say(f"recorded {why}")

        for is_good in (False, True):
            new = registry.publish(self._drafter, target_fingerprint="t", parent=serving).version
            say(f"published {new}")
            record("published", new)
            say(f"points {new}")
            registry.point_to(new, "better", only_from=serving)
            say(f"pointed {new}")
            record("promoted", new)
            found = WatchRecord(server="here:8000", version=new, found="watching")
            write_record(registry, found)
            if is_good:
                continue
            say(f"points {serving}")
            registry.roll_back(new, "low acceptance")
            say(f"pointed {serving}")
            say(f"marked {new}")
            record("rolled_back", new)
            say(f"deletes {new}")
            shutil.rmtree(registry.path(new))

    def check(self, folder: Path, runs: list[Run]) -> None:
        registry = Registry(folder)
        allowed: set[str] = set()
        for each in runs:
            for line in each.said:
                word, _, version = line.partition(" ")
                if word == "points":
                    allowed.add(version)
                elif word == "pointed":
                    allowed = {version}
        served = check_served(registry)
        assert not allowed or str(served) in allowed, f"{served} is served, expected {allowed}"
        published = [int(version) for version in lines(runs, "published")]
        assert published == sorted(set(published)), f"numbers of versions: {published}"
        deleted = set(map(int, lines(runs, "deletes")))
        for version in (*(set(published) - deleted), *registry.versions()):
            if version not in deleted:
                registry.verify(version)
        for version in map(int, lines(runs, "marked")):
            assert registry.bad_mark(version) is not None, f"the mark of {version} is lost"
        found = Counter(entry.why for entry in registry.ledger())
        for why in lines(runs, "recorded"):
            assert found[why] == 1, f"{found[why]} entries {why!r}"
        assert set(found) <= set(lines(runs, "records")), "an entry that nobody wrote"
        assert max(found.values(), default=0) <= 1, "an entry twice"

    def check_end(self, folder: Path, runs: list[Run]) -> None:
        self.check(folder, runs)
        assert left_behind(folder) == []
