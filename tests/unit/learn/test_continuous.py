"""Cycles on served states: the candidate that files give, without target and without files."""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from leadout.checkpoints import load_drafter
from leadout.cli.options import stopped_by_signals
from leadout.evaluate import hidden_states
from leadout.learn import continuous, cycle
from leadout.learn.config import LearnConfig, LearnError
from leadout.learn.continuous import learn_from_states
from leadout.learn.cycle import learn
from leadout.learn.gate import Evidence
from leadout.learn.report import LearnResult, print_result, read_status
from leadout.registry import Registry
from leadout.ring.channel import read_keys
from leadout.ring.relay import Relay
from leadout.ring.sequences import RingReader
from leadout.shards import Sample
from leadout.storage import StorageError
from leadout.train.config import TrainConfig
from leadout.train.export import SETTINGS
from support.learn_world import NEW, World, lossless_by_reference, requests, start, write_capture
from support.served_world import BASE_SEQUENCES, Ring, ring_of


@pytest.fixture
def undistilled(world: World, tmp_path: Path) -> World:
    """Its drafter is trained on the tokens of the text alone, as from served states."""
    drafter = tmp_path / "undistilled"
    shutil.copytree(world.drafter, drafter)
    first = TrainConfig.resolve({"distillation": 0.0}, drafter / SETTINGS)
    first.write(drafter / SETTINGS)
    return World(world.target, world.data, drafter)


@pytest.fixture
def ring(world: World) -> Iterator[Ring]:
    with ring_of(world) as made:
        yield made


def settings(world: World, folder: Path, **changes: Any) -> LearnConfig:
    folder.mkdir()
    start(world, folder / "registry")
    values = {
        "target": str(world.target),
        "registry": folder / "registry",
        "replay": world.data.folder,
        "work": folder / "work",
        "tokens": 12_000,
        "min_requests": 20,
        "learning_rate": 1e-2,
    }
    return LearnConfig.model_validate(values | changes)


def named_as_served(samples: list[Sample]) -> list[Sample]:
    """Captured under the names that a collector gives: names decide which blocks are drawn."""
    return [
        sample.model_copy(update={"id": f"served-{number:012}"})
        for number, sample in enumerate(samples, start=1)
    ]


def test_served_states_and_captured_files_train_the_same_candidate(
    undistilled: World, ring: Ring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(NEW, 150)
    capture = write_capture(tmp_path / "capture", undistilled.target, named_as_served(asked))
    from_files = settings(undistilled, tmp_path / "files", traffic=str(capture))
    expected = learn(from_files, lossless=lossless_by_reference)

    ring.serve(asked)

    def fake_load(*_: object) -> None:
        raise AssertionError("the learner loads the target")

    monkeypatch.setattr(hidden_states, "load_model", fake_load)
    monkeypatch.setattr("leadout.train.run.load_model", fake_load)
    monkeypatch.setattr("leadout.evaluate.reference.load_model", fake_load)
    from_ring = settings(undistilled, tmp_path / "ring", states=(str(ring.folder),), cycles=1)
    result = learn_from_states(from_ring)

    assert expected is not None
    assert result is not None
    assert (expected.promoted, result.promoted) == (True, True), result.decision.reasons
    made, wanted = result.adaptation, expected.adaptation
    assert made.steps == wanted.steps > 20
    assert made.traffic_requests == wanted.traffic_requests
    assert made.replay_sequences == wanted.replay_sequences
    one, other = (
        load_drafter(each.work_folder / "candidate", torch.float32).state_dict()
        for each in (from_ring, from_files)
    )
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-3, atol=1e-4, msg=name)
    assert result.evidence.traffic is not None
    assert expected.evidence.traffic is not None
    after = result.evidence.traffic.after.value
    assert after == pytest.approx(expected.evidence.traffic.after.value, rel=0.01)
    assert result.evidence.base is not None
    assert result.evidence.base.requests == expected.evidence.base.requests  # type: ignore[union-attr]


@pytest.fixture
def short(world: World, ring: Ring, computed_base: Path, tmp_path: Path) -> LearnConfig:
    """Trained long enough to be promoted, as nearly any loss on the base is let pass.

    The states of replayed data are there.
    """
    config = settings(
        world,
        tmp_path / "short",
        states=(str(ring.folder),),
        cycles=1,
        tokens=4_000,
        base_loss=0.9,
        base_sequences=BASE_SEQUENCES,
    )
    shutil.copytree(computed_base, config.work_folder / "base")
    return config


def test_the_check_by_the_engine_is_left_out_and_the_ledger_says_so(
    short: LearnConfig, ring: Ring, capsys: pytest.CaptureFixture[str]
) -> None:
    ring.serve(requests(NEW, 60))
    result = learn_from_states(short)
    assert result is not None
    assert result.promoted, result.decision.reasons
    assert result.evidence.lossless is None
    left_out = result.evidence.lossless_left_out
    assert left_out is not None
    assert f"lossless: left out, {left_out}" in result.decision.reasons
    last = read_status(short.registry).ledger[-1]
    assert last.event == "promoted"
    assert str(last.evidence["lossless"]).startswith("left out: ")
    assert result.served is not None
    assert (result.served.sequences, result.served.used) == (60, 60)
    print_result(result, str(short.registry), short.work_folder / "candidate")
    assert "60 sequences served since the start, 60 of them used" in capsys.readouterr().out
    assert LearnResult.model_validate_json(result.model_dump_json()) == result


def test_cycles_follow_each_other_from_the_version_that_is_served(
    short: LearnConfig, ring: Ring
) -> None:
    """The second waits for new requests, and keeps the old ones to train on."""
    ring.serve(requests(NEW, 60))
    results: list[LearnResult] = []

    def report(result: LearnResult) -> None:
        results.append(result)
        if len(results) == 1:
            ring.serve(requests(NEW, 30, first=100))

    learn_from_states(short.model_copy(update={"cycles": 2}), report)
    first, second = results
    assert first.promoted, first.decision.reasons
    assert second.parent == first.version == 2
    assert second.adaptation.traffic_requests > first.adaptation.traffic_requests
    assert second.served is not None
    assert second.served.used == 90
    decided = [each.event for each in read_status(short.registry).ledger][-1]
    assert decided in ("promoted", "rejected", "undecided")


def test_a_serving_version_that_changed_meanwhile_is_kept(
    short: LearnConfig, ring: Ring, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(short.registry)
    ring.serve(requests(NEW, 60))
    evaluate = cycle.evaluate

    def evaluate_after_a_roll_back(*words: Any) -> Evidence:
        other = registry.publish(world.drafter, target_fingerprint="-")
        registry.point_to(other.version, "rolled back to another one")
        return evaluate(*words)

    monkeypatch.setattr(cycle, "evaluate", evaluate_after_a_roll_back)
    result = learn_from_states(short)
    assert result is not None
    assert not result.promoted
    assert result.decision.reasons[0].startswith("serving: version 2 is served now")


def test_states_of_replayed_data_are_computed_once(
    short: LearnConfig, ring: Ring, computed_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_base = short.model_copy(update={"cycles": 0})
    folder = short.work_folder / "base"
    shutil.rmtree(folder)
    assert learn_from_states(only_base) is None
    states, info = (folder / "states.bin").read_bytes(), (folder / "base.json").read_text()

    def fake_child(*_: object, **__: object) -> None:
        raise AssertionError("states are computed again")

    with monkeypatch.context() as patched:
        patched.setattr("leadout.learn.base_states.Child", fake_child)
        learn_from_states(only_base)
    assert (folder / "states.bin").read_bytes() == states
    assert (folder / "base.json").read_text() == info
    assert info == (computed_base / "base.json").read_text()  # so other tests compute nothing
    learn_from_states(only_base.model_copy(update={"replay_states": 10}))
    assert len((folder / "states.bin").read_bytes()) < len(states)
    assert (folder / "base.json").read_text() != info


def test_a_ring_of_another_target_is_an_error(
    short: LearnConfig, ring: Ring, world: World, tmp_path: Path
) -> None:
    info = json.loads((ring.folder / "ring.json").read_text())
    other = Path(f"{ring.folder}-other")
    shutil.copytree(ring.folder, other, ignore=shutil.ignore_patterns("states-*", "texts-*"))
    try:
        (other / "ring.json").write_text(json.dumps({**info, "target_fingerprint": "f" * 64}))
        with pytest.raises(LearnError, match=r"has states of tiny \(fingerprint ffffffffffff\)"):
            learn_from_states(short.model_copy(update={"states": (str(other),)}))
        (other / "ring.json").write_text(json.dumps({**info, "dtype": "bfloat16"}))
        both = (str(ring.folder), str(other))
        with pytest.raises(LearnError, match=r"in bfloat16, but --states .* in float32"):
            learn_from_states(short.model_copy(update={"states": both}))
        (other / "ring.json").write_text(json.dumps({**info, "layer_ids": [0]}))
        with pytest.raises(LearnError, match=r"states of the layers \[0\]"):
            learn_from_states(short.model_copy(update={"states": (str(other),)}))
    finally:
        shutil.rmtree(other)


def test_a_server_on_another_host_feeds_the_learner_through_a_relay(
    short: LearnConfig, ring: Ring, tmp_path: Path
) -> None:
    key = tmp_path / "relay.key"
    key.write_text(base64.urlsafe_b64encode(bytes(range(32))).decode())
    reader = RingReader(ring.folder)
    relay = Relay(reader, ("127.0.0.1", 0), read_keys(key))

    def serve() -> None:
        while relay.learners == 0:  # what was served before is not kept for it
            time.sleep(0.05)
        ring.serve(requests(NEW, 60))

    threads = [threading.Thread(target=each, daemon=True) for each in (relay.run, serve)]
    for thread in threads:
        thread.start()
    place = f"tcp://127.0.0.1:{relay.port}"
    try:
        result = learn_from_states(
            short.model_copy(update={"states": (place,), "states_key": key, "tokens": 100})
        )
    finally:
        relay.close()
        threads[0].join(60)
        reader.close()
    assert result is not None
    assert result.served is not None
    assert result.served.used >= 40


def test_replayed_data_is_required(short: LearnConfig) -> None:
    with pytest.raises(LearnError, match="--replay is required"):
        learn_from_states(short.model_copy(update={"replay": None}))


def test_two_servers_feed_one_learner(short: LearnConfig, ring: Ring, world: World) -> None:
    with ring_of(world) as second:
        ring.serve(requests(NEW, 30))
        second.serve(requests(NEW, 30, first=100))
        both = (str(ring.folder), str(second.folder))
        result = learn_from_states(short.model_copy(update={"states": both}))
    assert result is not None
    assert result.served is not None
    assert result.served.used == 60


def pauses_in(log: pytest.LogCaptureFixture) -> list[float]:
    return [float(each) for each in re.findall(r"trying again in (\S+) seconds", log.text)]


def test_a_cycle_whose_registry_fails_is_tried_again_with_what_is_in_memory(
    short: LearnConfig,
    ring: Ring,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A store that cannot be reached at the end, then a held lock and a full disk before that."""
    unreachable = StorageError("s3://bucket cannot be reached.")
    problems = [
        TimeoutError(".lock has been held by another process"),
        OSError(errno.ENOSPC, "No space left on device"),
    ]
    publish, run_cycle, tries = Registry.publish, continuous._run_cycle, count(1)

    def fake_publish(*words: Any, **settings: Any) -> Any:
        if problems:
            raise unreachable
        return publish(*words, **settings)

    def fake_cycle(*words: Any) -> LearnResult:
        if next(tries) > 1 and problems:
            raise problems.pop(0)
        return run_cycle(*words)

    monkeypatch.setattr(Registry, "publish", fake_publish)
    monkeypatch.setattr(continuous, "_run_cycle", fake_cycle)
    monkeypatch.setattr(continuous, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(continuous, "MAX_PAUSE", 0.2)
    ring.serve(requests(NEW, 60))
    reported: list[LearnResult] = []
    result = learn_from_states(short, reported.append)
    assert problems == []
    assert result is not None
    assert result.promoted, result.decision.reasons
    assert (reported, result.version) == ([result], 2)
    assert result.served is not None
    assert result.served.used == 60
    assert pauses_in(caplog) == [0.1, 0.2, 0.2]
    assert "A cycle failed: s3://bucket cannot be reached. What was served" in caplog.text


def test_a_decision_that_was_not_recorded_is_before_the_next_cycle(
    short: LearnConfig, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The candidate is served already, so the next cycle starts from it."""
    record, failed = Registry.record, []

    def fake_record(self: Registry, event: Any, *words: Any, **settings: Any) -> Any:
        if event == "promoted" and not failed:
            failed.append(event)
            raise StorageError("The ledger cannot be reached.")
        return record(self, event, *words, **settings)

    monkeypatch.setattr(Registry, "record", fake_record)
    monkeypatch.setattr(continuous, "FIRST_PAUSE", 0.01)
    ring.serve(requests(NEW, 60))
    result = learn_from_states(short)
    assert failed == ["promoted"]
    assert result is not None
    assert result.parent == 2
    events = [(each.event, each.version) for each in read_status(short.registry).ledger]
    assert events.count(("promoted", 2)) == 1


def test_an_error_of_settings_ends_the_learner(
    short: LearnConfig, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of settings that were right when it started."""
    answers = [continuous.open_inputs(short), LearnError("--registry: for another target.")]

    def fake_inputs(_: LearnConfig) -> Any:
        answer = answers.pop(0)  # an IndexError if it tries again
        if isinstance(answer, LearnError):
            raise answer
        return answer

    monkeypatch.setattr(continuous, "open_inputs", fake_inputs)
    monkeypatch.setattr(continuous, "FIRST_PAUSE", 0.01)
    ring.serve(requests(NEW, 60))
    with pytest.raises(LearnError, match="for another target"):
        learn_from_states(short)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_pause_of_a_learner(
    short: LearnConfig,
    ring: Ring,
    sent: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ring.serve(requests(NEW, 60))
    monkeypatch.setattr(continuous, "FIRST_PAUSE", 3600.0)

    def fake_cycle(*_: Any) -> Any:
        raise StorageError("s3://bucket cannot be reached.")

    class Signalling(logging.Handler):
        """Sends the signal a moment after the learner has said that it waits."""

        def emit(self, record: logging.LogRecord) -> None:
            threading.Timer(0.2, os.kill, (os.getpid(), sent)).start()

    monkeypatch.setattr(continuous, "_run_cycle", fake_cycle)
    logger, handler = logging.getLogger(continuous.__name__), Signalling()
    logger.addHandler(handler)
    began = time.monotonic()
    try:
        with stopped_by_signals(), pytest.raises(KeyboardInterrupt):
            learn_from_states(short)
    finally:
        logger.removeHandler(handler)
    assert pauses_in(caplog) == [3600.0]
    assert time.monotonic() - began < 3600
