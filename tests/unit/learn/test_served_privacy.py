"""However learning from served states ends, no file has anything that users wrote."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from leadout.registry import Registry
from support.learn_outcomes import MARKERS, REQUESTS, marked
from support.learn_world import NEW, World, requests, start
from support.marker import files_with
from support.served_outcomes import OUTCOMES, ServedLearner, leaves_core_files
from support.served_world import Ring, ring_of


@pytest.fixture
def ring(world: World) -> Iterator[Ring]:
    with ring_of(world) as made:
        made.serve(marked(requests(NEW, REQUESTS)))
        yield made


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_no_outcome_leaves_text(
    outcome: str, world: World, ring: Ring, computed_base: Path, tmp_path: Path
) -> None:
    if outcome == "aborted" and not leaves_core_files(tmp_path / "core"):
        pytest.skip("this system writes no core files into the working directory")
    assert files_with(MARKERS, [ring.folder])[0]  # in memory, so that the search could find them
    folder = tmp_path / "sandbox"
    registry = start(world, folder / "registry")
    learner = ServedLearner(world, ring.folder, registry.folder, folder)
    if outcome != "published":  # it computes the states of replayed data itself
        shutil.copytree(computed_base, learner.work / "base")
    printed = learner.run(outcome)
    found, searched = files_with(MARKERS, [folder])
    assert found == []
    assert searched > 10
    assert list((folder / "cwd").iterdir()) == []  # no core file
    left = {path.name for path in learner.work.rglob("*") if path.is_file()}
    assert not {name for name in left if name.endswith(".jsonl")} - {"log.jsonl"}
    assert not (learner.work / "run" / "states.bin").exists()
    assert Registry(registry.folder).versions() == ([1, 2] if outcome == "published" else [1])
    if outcome in ("published", "rejected"):
        assert f'"promoted":{"true" if outcome == "published" else "false"}' in printed
        # It has neither the engine nor the target's model class.
        assert "imported: []" in printed
        assert "core: (0, 0)" in printed
        assert "dumpable: 0" in printed
    if outcome == "stopped":
        assert "stopped; the served text was in memory only" in printed
