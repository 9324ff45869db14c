"""A plan counts and measures, for any target and source of states; it knows no model by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path

import pytest

from leadout.data.manifest import DataFolder
from leadout.evaluate.hidden_states import Indexed, StateSource
from leadout.pairing import read_sizes
from leadout.train import plan as module
from leadout.train.loop import sequences_of_step
from leadout.train.plan import Plan, Timing, make_plan, work_of
from support.small_runs import MakeRun

PLAN = Plan(
    samples=100,
    response_tokens=5000,
    layers=5,
    anchors=64,
    batch_sequences=8,
    steps=10,
    blocks=5120,
    visits=1.5,
    trained_parameters=1000,
    target_parameters=100_000,
    states="disk",
    target_in_process=True,
    device="H100",
    ranks=8,
    seconds_per_step=1.0,
    seconds_for_states=120.0,
    seconds_per_validation=1.0,
    minutes=3.0,
    drafter_gib=4.0,
    target_gib=15.0,
    peak_memory_gib=30.0,
    device_memory_gib=80.0,
    states_on_disk_gib=0.5,
    checkpoint_gib=0.1,
)


def test_a_plan_says_what_is_not_known() -> None:
    text = PLAN.text()
    assert "3 minutes on 8 x H100" in text
    assert "2 minutes once for the target's states" in text
    assert "not known before training" in text
    assert "warning" not in text
    assert "SmolLM2" not in inspect.getsource(module)


def test_a_plan_warns_of_full_memory() -> None:
    assert "Lower --micro-tokens" in PLAN.model_copy(update={"peak_memory_gib": 79.0}).text()


class FakeServedStates:
    """States from elsewhere: the target is not in this process."""

    def __init__(self, source: StateSource) -> None:
        self.observe = source.observe
        self.announced: list[int] = []

    def announce(self, sequences: Iterable[Indexed]) -> None:
        self.announced += [index for index, _ in sequences]


@pytest.mark.parametrize("states", ["compute", "disk"])
def test_the_target_is_counted_once(
    make_run: MakeRun,
    target_folder: Path,
    data: DataFolder,
    monkeypatch: pytest.MonkeyPatch,
    states: str,
) -> None:
    """In process its time is a part of every step, on disk it comes once for the whole data."""
    run, sizes = make_run(states=states, epochs=2.0), read_sizes(target_folder)
    monkeypatch.setattr(module, "time_steps", lambda _: Timing(1.0, 0.5, 0.0))
    found = make_plan(run, data, sizes)
    parts = run.corpus.split
    kept = sum(run.corpus.lengths[index] for index in {*parts.train, *parts.validation})
    once = 0.5 * kept if states == "disk" else 0.0
    assert found.seconds_for_states == once
    assert found.minutes == pytest.approx((run.steps + once) / 60)
    assert found.target_gib == pytest.approx(
        4 * (sizes.parameters + sizes.embedding_parameters) / 2**30
    )
    weights = sum(p.numel() for p in run.drafter.parameters())
    assert found.trained_parameters == weights == work_of(run, sizes).parameters
    assert found.drafter_gib == pytest.approx(weights * 4 * 3 / 2**30)  # float32 and Muon
    assert found.device == "CPU"
    assert 0 < found.peak_memory_gib < found.device_memory_gib


def test_a_short_run_keeps_only_the_states_of_the_samples_it_sees(
    make_run: MakeRun, target_folder: Path, data: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sizes = make_run(states="disk", epochs=0.5), read_sizes(target_folder)
    monkeypatch.setattr(module, "time_steps", lambda _: Timing(1.0, 2.0, 0.0))
    trained, held_out = (
        sum(run.corpus.lengths[index] for index in part)
        for part in (run.corpus.split.train, run.corpus.split.validation)
    )
    assert make_plan(run, data, sizes).seconds_for_states == trained + 2 * held_out


def test_a_plan_counts_the_blocks_that_are_drawn(
    make_run: MakeRun, target_folder: Path, data: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(anchors_per_token=1.0)
    monkeypatch.setattr(module, "time_steps", lambda _: Timing(1.0, 2.0, 0.0))
    plan = make_plan(run, data, read_sizes(target_folder))
    assert (
        plan.anchors == round(run.blocks_per_step / run.config.batch_sequences) > run.config.anchors
    )
    assert f"with about {plan.anchors} blocks" in plan.text()


def test_with_served_states_only_embedding_and_head_are_held(
    make_run: MakeRun, target_folder: Path, data: DataFolder
) -> None:
    run, sizes = make_run(), read_sizes(target_folder)
    served = FakeServedStates(run.source)
    run.source, run.target_in_process = served, False
    found = make_plan(run, data, sizes)
    # Servers compute several texts at a time, so that all of a step are announced first.
    step = sequences_of_step(run.corpus.split.train, 0, run.config)
    assert set(step) <= set(served.announced)
    assert found.states == "served"
    assert found.target_gib == pytest.approx(4 * sizes.embedding_parameters / 2**30)
    assert (found.seconds_for_states, found.states_on_disk_gib) == (0, 0)
    assert found.seconds_per_step > 0
