"""A whole cycle on a tiny target, with the reference decoder instead of the engine."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leadout.check.result import Lossless
from leadout.checkpoints import load_weights, read_checkpoint
from leadout.checkpoints.tensors import DRAFT_TO_TARGET
from leadout.engine.capture_store import segment_name, segment_paths
from leadout.errors import StoppedError
from leadout.evaluate.acceptance import acceptance_by_drafter
from leadout.evaluate.target_weights import HEAD
from leadout.learn import work_folder
from leadout.learn.config import LearnConfig, LearnError, TooLittleTrafficError
from leadout.learn.cycle import RECORD, learn, start_registry
from leadout.learn.data import BASE, read_part
from leadout.learn.report import LearnResult
from leadout.learn.work_folder import CYCLE, WorkFolder
from leadout.registry import Registry, RegistryError
from leadout.shards import Sample
from leadout.train.init import reduce_draft_vocab
from leadout.train.progress import read_log
from support.learn_world import (
    ALONE,
    NEW,
    World,
    lossless_by_reference,
    requests,
    start,
    write_capture,
)


class KilledError(Exception):
    """Simulates that the process is killed."""


@pytest.fixture
def config(world: World, tmp_path: Path) -> LearnConfig:
    start(world, tmp_path / "registry")
    capture = write_capture(tmp_path / "capture", world.target, requests(NEW, 150))
    return LearnConfig(
        target=str(world.target),
        registry=tmp_path / "registry",
        traffic=capture,
        replay=world.data.folder,
        work=tmp_path / "work",
        tokens=12_000,  # about 60 steps
        min_requests=20,
        learning_rate=1e-2,
    )


def changed(config: LearnConfig, **changes: Any) -> LearnConfig:
    return config.model_copy(update=changes)


def shorter(config: LearnConfig, **changes: Any) -> LearnConfig:
    """Trained long enough to be promoted, as nearly any loss on the few base sequences is let pass.

    For tests of what surrounds the training.
    """
    return changed(config, **{"tokens": 4_000, "base_loss": 0.9, "base_sequences": 20} | changes)


def run_cycle(config: LearnConfig) -> LearnResult:
    result = learn(config, lossless=lossless_by_reference)
    assert result is not None
    return result


def test_a_drafter_that_has_learned_its_traffic_is_promoted(
    config: LearnConfig, world: World
) -> None:
    result = run_cycle(config)
    assert result.promoted, result.decision.reasons
    registry = Registry(config.registry)
    pointer = registry.pointer()
    assert pointer is not None
    assert pointer.version == result.version == 2
    manifest = registry.verify(2)
    assert manifest.parent == 1
    assert set(manifest.promises) == {"traffic", "asked", "self"}
    evidence = result.evidence
    assert evidence.traffic is not None
    assert manifest.promises["traffic"].acceptance_length == evidence.traffic.after.value
    assert manifest.promises["traffic"].requests == 30  # a fifth of the traffic
    expected = manifest.promises["traffic"]
    assert expected.per_request is not None
    assert expected.before is not None
    assert expected.per_request.length > expected.before.length > 1
    assert evidence.traffic.change.low > config.gain
    curve = [point.by_source["traffic"] for point in result.adaptation.curve]
    assert curve[-1] > curve[0] + 0.3
    # Shape and settings of the first training are kept for the next cycle.
    assert read_checkpoint(registry.path(2)).config == read_checkpoint(world.drafter).config
    first, second = (registry.path(version) / "training.yaml" for version in (1, 2))
    assert first.read_text() == second.read_text()
    record = json.loads((registry.path(2) / RECORD).read_text())
    assert record["training"]["initial"] == "version 1"
    assert str(config.work_folder) not in json.dumps(record)
    events = [(entry.event, entry.version) for entry in registry.ledger()]
    assert events == [("published", 1), ("promoted", 1), ("published", 2), ("promoted", 2)]
    assert registry.ledger()[-1].evidence["traffic_change"] > config.gain
    assert evidence.first == evidence.base  # version 1 was serving
    assert "first_change_low" in registry.ledger()[-1].evidence
    # Nothing that users wrote is left behind.
    left = {path.name for path in config.work_folder.rglob("*") if path.is_file()}
    assert not {name for name in left if name.endswith((".jsonl", ".bin"))} - {"log.jsonl"}
    assert WorkFolder(config.work_folder).interrupted_cycle() is None


def test_a_drafter_with_a_reduced_vocabulary_learns_and_keeps_its_head(
    config: LearnConfig, world: World, tmp_path: Path
) -> None:
    traffic = [sample.response for sample in requests(NEW, 150)]
    counts = Counter(token for answer in traffic for token in answer)
    never_drafted = {token for token, _ in counts.most_common(2)}  # words of the traffic
    answers = [
        [token for token in answer if token not in never_drafted]
        for answer in [*traffic, *(sample.response for sample in world.data.samples())]
    ]
    size = len({token for answer in answers for token in answer})
    parent, _ = reduce_draft_vocab(world.drafter, tmp_path / "reduced", world.target, answers, size)
    shutil.copyfile(world.drafter / "training.yaml", parent.path / "training.yaml")
    place = tmp_path / "reduced-registry"
    start_registry(str(world.target), place, str(parent.path))
    result = run_cycle(shorter(config, registry=place))
    assert result.promoted, result.decision.reasons
    published = read_checkpoint(Registry(place).path(2))
    assert published.config == parent.config
    before, after = load_weights(parent), load_weights(published)
    assert before.keys() == after.keys()
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {HEAD, DRAFT_TO_TARGET}
    # Validation measures what the gate does: with the words that cannot be drafted, it is lower.
    held_out = requests(NEW, 30, first=900)
    whole, reduced, learned = (
        np.mean([1 + np.mean(text.at_steps) for text in texts])
        for texts in acceptance_by_drafter(
            world.target, [world.drafter, parent.path, published.path], held_out, 64, ALONE.device
        )
    )
    assert reduced < min(whole, learned)
    first, last = (result.adaptation.curve[i].by_source["traffic"] for i in (0, -1))
    assert first == pytest.approx(reduced, rel=0.05)
    assert last == pytest.approx(learned, rel=0.05)


def test_a_candidate_that_gains_too_little_is_rejected(
    config: LearnConfig,
) -> None:
    result = run_cycle(changed(config, tokens=100, gain=0.5))
    assert not result.promoted
    assert result.version is None
    registry = Registry(config.registry)
    assert registry.versions() == [1]
    last = registry.ledger()[-1]
    assert (last.event, last.version) == ("rejected", None)
    assert last.why.startswith("traffic: acceptance length")


def test_a_killed_cycle_publishes_nothing_and_continues_later(
    config: LearnConfig,
) -> None:
    def die(target: Path, drafter: Path, samples: Sequence[Sample]) -> Lossless:
        raise KilledError

    config = shorter(config)
    with pytest.raises(KilledError):
        learn(config, lossless=die)
    registry, work = Registry(config.registry), WorkFolder(config.work_folder)
    assert registry.versions() == [1]
    assert work.interrupted_cycle() is not None
    trained = list(read_log(work.run))
    result = run_cycle(config)
    assert list(read_log(work.run)) == trained  # not trained again
    assert result.promoted
    assert registry.versions() == [1, 2]


def test_a_killed_cycle_continues_although_older_traffic_has_arrived_since(
    config: LearnConfig, world: World, tmp_path: Path
) -> None:
    """As when another server uploads what it captured before the cycle began."""

    def die(target: Path, drafter: Path, samples: Sequence[Sample]) -> Lossless:
        raise KilledError

    config = shorter(config, tokens=100)
    work, capture = WorkFolder(config.work_folder), Path(config.required("traffic"))
    late = segment_paths(capture)[0].rename(tmp_path / "late")
    with pytest.raises(KilledError):
        learn(config, lossless=die)
    before, trained = work.interrupted_cycle(), list(read_log(work.run))
    assert before is not None
    late.rename(capture / segment_name(datetime(2020, 1, 1, tzinfo=UTC), 1))
    with pytest.raises(KilledError):
        learn(config, lossless=die)
    assert work.interrupted_cycle() == before
    assert list(read_log(work.run)) == trained  # not trained again


def test_an_interrupted_cycle_of_an_earlier_release_starts_over(config: LearnConfig) -> None:
    """Its file does not say which traffic it had read."""

    def die(target: Path, drafter: Path, samples: Sequence[Sample]) -> Lossless:
        raise KilledError

    config = shorter(config, tokens=100)
    work = WorkFolder(config.work_folder)
    with pytest.raises(KilledError):
        learn(config, lossless=die)
    recorded = json.loads((work.folder / CYCLE).read_text())
    del recorded["segments"]
    (work.folder / CYCLE).write_text(json.dumps({**recorded, "newest": "2026"}))
    assert work.interrupted_cycle() is None
    assert run_cycle(config).adaptation.steps > 0


def test_ctrl_c_says_how_to_continue(config: LearnConfig) -> None:
    def interrupt(target: Path, drafter: Path, samples: Sequence[Sample]) -> Lossless:
        raise KeyboardInterrupt

    with pytest.raises(StoppedError, match="Run the same command again to continue") as stopped:
        learn(shorter(config, tokens=100), lossless=interrupt)
    assert stopped.value.exit_code == 130
    assert WorkFolder(config.work_folder).interrupted_cycle() is not None


def test_a_cycle_killed_in_training_continues_from_its_last_step(
    config: LearnConfig,
) -> None:
    config, work = changed(config, tokens=20_000), WorkFolder(config.work_folder)
    words = ["learn", config.target, "--registry", config.registry, "--work", config.work]
    words += ["--traffic", config.traffic, "--replay", config.replay, "--tokens", config.tokens]
    words += ["--min-requests", config.min_requests, "--learning-rate", config.learning_rate]
    process = subprocess.Popen(
        [sys.executable, "-m", "leadout", *map(str, words)],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    log = work.run / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > 10):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    registry = Registry(config.registry)
    assert [path.name for path in (registry.folder / "versions").iterdir()] == ["0001"]
    before = list(read_log(work.run))
    assert work.interrupted_cycle() is not None
    result = run_cycle(config)
    after = list(read_log(work.run))
    assert after[:10] == before[:10]  # kept, not trained again
    assert len(before) < len(after) == result.adaptation.steps + len(result.adaptation.curve) - 1
    assert result.promoted


def test_an_interrupted_cycle_with_other_settings_starts_over(
    config: LearnConfig,
) -> None:
    def die(target: Path, drafter: Path, samples: Sequence[Sample]) -> Lossless:
        raise KilledError

    config, first = shorter(config), shorter(config, tokens=100)
    with pytest.raises(KilledError):
        learn(first, lossless=die)
    made = run_cycle(config).adaptation
    assert made.config == config.cycle != first.cycle
    assert made.steps > 10  # more than the interrupted cycle had


def test_a_serving_version_that_changed_meanwhile_is_kept(
    config: LearnConfig, world: World
) -> None:
    registry = Registry(config.registry)

    def roll_back(target: Path, drafter: Path, samples: Sequence[Sample]) -> Lossless:
        other = registry.publish(world.drafter, target_fingerprint="-")
        registry.point_to(other.version, "rolled back to another one")
        return lossless_by_reference(target, drafter, samples)

    result = learn(shorter(config), lossless=roll_back)
    assert result is not None
    assert not result.promoted
    assert result.decision.reasons[0].startswith("serving: version 2 is served now")
    pointer = registry.pointer()
    assert pointer is not None
    assert pointer.version == 2


def test_each_cycle_has_its_own_base_sequences_even_after_a_rejection(
    config: LearnConfig,
) -> None:
    seen: list[set[str]] = []

    def watch(target: Path, drafter: Path, samples: Sequence[Sample]) -> Lossless:
        base = read_part(WorkFolder(config.work_folder).mix, BASE)
        seen.append({sample.id for sample in base})
        return lossless_by_reference(target, drafter, samples)

    short = changed(config, tokens=100, gain=0.5, base_sequences=20)
    for _ in range(2):
        result = learn(short, lossless=watch)
        assert result is not None
        assert result.decision.verdict == "rejected"
    first, second = seen
    assert len(first) == len(second) == 20
    assert not first & second


def test_without_the_first_version_nothing_is_trained(config: LearnConfig, world: World) -> None:
    registry = Registry(config.registry)
    manifest = registry.manifest(1)
    second = registry.publish(
        world.drafter, target_fingerprint=manifest.target_fingerprint, parent=1
    )
    registry.point_to(second.version, "promoted")
    shutil.rmtree(registry.path(1))
    with pytest.raises(RegistryError, match="compared with version 1"):
        run_cycle(config)
    assert not config.work_folder.exists()


def test_a_cycle_with_too_little_traffic_leaves_nothing_that_users_wrote(
    config: LearnConfig, tmp_path: Path
) -> None:
    with pytest.raises(TooLittleTrafficError):
        run_cycle(changed(config, min_requests=1000))
    left = [path.name for path in (tmp_path / "work").rglob("*") if path.is_file()]
    assert left == ["lock"]


def test_text_that_cannot_be_deleted_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = WorkFolder(tmp_path)
    work.mix.mkdir()

    def fake_rmtree(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", fake_rmtree)
    with pytest.raises(LearnError, match="mix cannot be deleted: Permission denied"):
        work.finish()


def test_two_cycles_in_one_folder_are_an_error(
    config: LearnConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_folder, "MAX_REMOVER_SECONDS", 0.1)
    with (
        WorkFolder(config.work_folder).locked(),
        pytest.raises(LearnError, match="in use by another cycle"),
    ):
        run_cycle(config)


def test_replay_of_another_target_is_an_error(
    config: LearnConfig, world: World, tmp_path: Path
) -> None:
    other = tmp_path / "data"
    other.mkdir()
    for path in world.data.folder.iterdir():
        text = path.read_text().replace(world.data.job.target_fingerprint, "f" * 64)
        (other / path.name).write_text(text)
    with pytest.raises(LearnError, match=r"--replay .* has answers of tiny"):
        run_cycle(changed(config, replay=other))


def test_a_registry_of_another_target_is_an_error(config: LearnConfig, world: World) -> None:
    registry = Registry(config.registry)
    other = registry.publish(world.drafter, target_fingerprint="f" * 64)
    registry.point_to(other.version, "by hand")
    with pytest.raises(LearnError, match=r"--registry .* has drafters for another target"):
        run_cycle(config)


def test_a_registry_is_created_once_and_with_a_fitting_drafter(
    world: World, tmp_path: Path
) -> None:
    registry = start(world, tmp_path / "registry")
    assert registry.versions() == [1]
    with pytest.raises(LearnError, match="already is a registry, which serves version 1"):
        start_registry(str(world.target), tmp_path / "registry", str(world.drafter))
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in world.drafter.iterdir():
        content = path.read_bytes().replace(b'"vocab_size": 320', b'"vocab_size": 300')
        (broken / path.name).write_bytes(content)
    with pytest.raises(LearnError, match="the drafter does not fit the target"):
        start_registry(str(world.target), tmp_path / "other", str(broken))
    assert Registry(tmp_path / "other").pointer() is None
