"""However a cycle ends, nothing that users wrote is outside the captured traffic.

The outcomes that need no engine; experiments/privacy_marker.py has all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from leadout.learn.config import LearnConfig
from leadout.learn.cycle import learn
from leadout.registry import Registry
from support.learn_outcomes import MARKERS, Sandbox
from support.learn_world import World, lossless_by_reference
from support.marker import files_with


@pytest.fixture
def sandbox(world: World, tmp_path: Path) -> Sandbox:
    return Sandbox(world, tmp_path / "sandbox")


def settings(sandbox: Sandbox, world: World, tokens: int) -> LearnConfig:
    return LearnConfig(
        target=str(world.target),
        registry=sandbox.registry,
        traffic=sandbox.traffic,
        replay=world.data.folder,
        work=sandbox.folder / "work",
        tokens=tokens,
        min_requests=20,
        learning_rate=1e-2,
    )


def test_a_killed_cycle_leaves_no_text_and_continues(
    sandbox: Sandbox, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = sandbox.run("killed")
    assert ended.found == []
    assert ended.left == []
    assert ended.searched > 10
    log = sandbox.folder / "work" / "run" / "log.jsonl"
    before = log.read_bytes()
    config = settings(sandbox, world, tokens=400_000)

    class StoppedHereError(Exception):
        """Ends the cycle as soon as it has been prepared."""

    def stop(*_: object, **__: object) -> None:
        assert files_with(MARKERS, [sandbox.folder / "work"])[0]  # selected again
        raise StoppedHereError

    monkeypatch.setattr("leadout.learn.cycle.make_run", stop)
    with pytest.raises(StoppedHereError):
        learn(config, lossless=lossless_by_reference)
    assert log.read_bytes() == before  # it would have continued
    assert files_with(MARKERS, [sandbox.folder], [sandbox.traffic])[0] == []


def test_a_cycle_with_too_little_traffic_leaves_no_text(sandbox: Sandbox) -> None:
    ended = sandbox.run("too little traffic")
    assert (ended.found, ended.left) == ([], [])


def test_published_and_rejected_candidates_have_no_text(
    sandbox: Sandbox, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = sandbox.folder / "tmp"
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    config = settings(sandbox, world, tokens=12_000)
    for changes, promoted in (({"tokens": 100, "gain": 0.5}, False), ({}, True)):
        result = learn(config.model_copy(update=changes), lossless=lossless_by_reference)
        assert result is not None
        assert result.promoted is promoted, result.decision.reasons
        (sandbox.folder / f"result-{promoted}.json").write_text(result.model_dump_json())
        assert files_with(MARKERS, [sandbox.folder], [sandbox.traffic])[0] == []
    assert Registry(sandbox.registry).versions() == [1, 2]
