"""A whole cycle on a tiny target, with the reference loop in the engine's place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from leadout.check.result import Lossless
from leadout.checkpoints import read_checkpoint
from leadout.learn.config import LearnConfig, LearnError, LearnRequest
from leadout.learn.cycle import RECORD, learn
from leadout.learn.prepare import Work
from leadout.learn.promote import start_registry
from leadout.learn.report import LearnResult
from leadout.registry import Registry
from leadout.shards import Sample
from leadout.train.progress import read_log
from support.learn_world import NEW, World, prove_by_reference, requests, start, write_capture

# Some 60 steps.
CONFIG = LearnConfig(tokens=12_000, least_requests=20, learning_rate=1e-2)


class KilledError(Exception):
    """Stands for the death of the process."""


@pytest.fixture
def request_of_world(world: World, tmp_path: Path) -> LearnRequest:
    start(world, tmp_path / "registry")
    capture = write_capture(tmp_path / "capture", world.target, requests(NEW, 150))
    return LearnRequest(
        target=str(world.target),
        registry=tmp_path / "registry",
        traffic=capture,
        replay=world.data.folder,
        work=tmp_path / "work",
        config=CONFIG,
    )


def carry_out(request: LearnRequest) -> LearnResult:
    result = learn(request, prove=prove_by_reference)
    assert result is not None
    return result


def test_a_cycle_promotes_a_drafter_that_has_learnt_its_traffic(
    request_of_world: LearnRequest, world: World
) -> None:
    result = carry_out(request_of_world)
    assert result.promoted, result.decision.reasons
    registry = Registry(request_of_world.registry)
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
    assert evidence.traffic.change.low > CONFIG.gain
    curve = [point.by_source["traffic"] for point in result.adaptation.curve]
    assert curve[-1] > curve[0] + 0.3
    # The same shape and the same settings of the first training, for the next cycle.
    assert read_checkpoint(registry.path(2)).config == read_checkpoint(world.drafter).config
    first, second = (registry.path(version) / "training.yaml" for version in (1, 2))
    assert first.read_text() == second.read_text()
    record = json.loads((registry.path(2) / RECORD).read_text())
    assert record["training"]["initial"] == "version 1"
    assert str(request_of_world.work) not in json.dumps(record)
    events = [(entry.event, entry.version) for entry in registry.ledger()]
    assert events == [("published", 1), ("promoted", 1), ("published", 2), ("promoted", 2)]
    assert registry.ledger()[-1].evidence["traffic_change"] > CONFIG.gain
    # Nothing of what users wrote is left behind.
    left = {path.name for path in request_of_world.work.rglob("*") if path.is_file()}
    assert not {name for name in left if name.endswith((".jsonl", ".bin"))} - {"log.jsonl"}
    assert Work(request_of_world.work).cut_off() is None


def test_a_candidate_that_gains_too_little_is_rejected_and_nothing_changes(
    request_of_world: LearnRequest,
) -> None:
    strict = CONFIG.model_copy(update={"tokens": 100, "gain": 0.5})
    result = carry_out(replace(request_of_world, config=strict))
    assert not result.promoted
    assert result.version is None
    registry = Registry(request_of_world.registry)
    assert registry.versions() == [1]
    last = registry.ledger()[-1]
    assert (last.event, last.version) == ("rejected", None)
    assert last.why.startswith("traffic: acceptance length")


def test_a_cycle_that_dies_publishes_nothing_and_goes_on_later(
    request_of_world: LearnRequest,
) -> None:
    def die(target: Path, drafter: Path, samples: Sequence[Sample]) -> Lossless:
        raise KilledError

    with pytest.raises(KilledError):
        learn(request_of_world, prove=die)
    registry, work = Registry(request_of_world.registry), Work(request_of_world.work)
    assert registry.versions() == [1]
    assert work.cut_off() is not None
    trained = list(read_log(work.run))
    result = carry_out(request_of_world)
    assert list(read_log(work.run)) == trained  # not once more
    assert result.promoted
    assert registry.versions() == [1, 2]


def test_a_learner_that_is_killed_in_training_goes_on_where_it_was(
    request_of_world: LearnRequest,
) -> None:
    longer = CONFIG.model_copy(update={"tokens": 40_000})
    request, work = replace(request_of_world, config=longer), Work(request_of_world.work)
    words = ["learn", request.target, "--registry", request.registry, "--work", request.work]
    words += ["--traffic", request.traffic, "--replay", request.replay, "--tokens", longer.tokens]
    words += ["--least-requests", longer.least_requests, "--learning-rate", longer.learning_rate]
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
    registry = Registry(request.registry)
    assert [path.name for path in (registry.folder / "versions").iterdir()] == ["0001"]
    before = list(read_log(work.run))
    assert work.cut_off() is not None
    result = carry_out(request)
    after = list(read_log(work.run))
    assert after[:10] == before[:10]  # kept, not done again
    assert len(before) < len(after) == result.adaptation.steps + len(result.adaptation.curve) - 1
    assert result.promoted


def test_a_cycle_cut_off_under_another_request_begins_anew(
    request_of_world: LearnRequest,
) -> None:
    def die(target: Path, drafter: Path, samples: Sequence[Sample]) -> Lossless:
        raise KilledError

    short = replace(request_of_world, config=CONFIG.model_copy(update={"tokens": 100}))
    with pytest.raises(KilledError):
        learn(short, prove=die)
    made = carry_out(request_of_world).adaptation
    assert made.config == CONFIG
    assert made.steps > 30  # and not the one of before


def test_a_pointer_that_has_moved_meanwhile_is_left_alone(
    request_of_world: LearnRequest, world: World
) -> None:
    registry = Registry(request_of_world.registry)

    def roll_back(target: Path, drafter: Path, samples: Sequence[Sample]) -> Lossless:
        other = registry.publish(world.drafter, target_fingerprint="-")
        registry.point_to(other.version, "rolled back to another one")
        return prove_by_reference(target, drafter, samples)

    result = learn(request_of_world, prove=roll_back)
    assert result is not None
    assert not result.promoted
    assert result.decision.reasons[0].startswith("serving: found version 2, wanted 1")
    pointer = registry.pointer()
    assert pointer is not None
    assert pointer.version == 2


def test_two_cycles_in_one_folder_are_refused(request_of_world: LearnRequest) -> None:
    with (
        Work(request_of_world.work).locked(),
        pytest.raises(LearnError, match="found another cycle at work in it"),
    ):
        carry_out(request_of_world)


def test_replay_of_another_target_is_refused(
    request_of_world: LearnRequest, world: World, tmp_path: Path
) -> None:
    other = tmp_path / "data"
    other.mkdir()
    for path in world.data.folder.iterdir():
        text = path.read_text().replace(world.data.job.target_fingerprint, "f" * 64)
        (other / path.name).write_text(text)
    with pytest.raises(LearnError, match=r"--replay .*: found answers of tiny"):
        carry_out(replace(request_of_world, replay=other))


def test_a_registry_of_another_target_is_refused(
    request_of_world: LearnRequest, world: World
) -> None:
    registry = Registry(request_of_world.registry)
    other = registry.publish(world.drafter, target_fingerprint="f" * 64)
    registry.point_to(other.version, "by hand")
    with pytest.raises(LearnError, match=r"--registry .*: found drafters for another target"):
        carry_out(request_of_world)


def test_a_registry_is_started_once_and_with_a_fitting_drafter(
    world: World, tmp_path: Path
) -> None:
    registry = start(world, tmp_path / "registry")
    assert registry.versions() == [1]
    with pytest.raises(LearnError, match=r"found a registry in .* that serves version 1"):
        start_registry(str(world.target), tmp_path / "registry", str(world.drafter))
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in world.drafter.iterdir():
        content = path.read_bytes().replace(b'"vocab_size": 320', b'"vocab_size": 300')
        (broken / path.name).write_bytes(content)
    with pytest.raises(LearnError, match="target and drafter do not fit"):
        start_registry(str(world.target), tmp_path / "other", str(broken))
    assert Registry(tmp_path / "other").pointer() is None
