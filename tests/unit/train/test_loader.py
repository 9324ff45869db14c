"""Passes prepared ahead: in order, bounded, with errors of the thread raised in the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch

from leadout.dflash.target import Observation
from leadout.evaluate.blocks import TrainingSequence
from leadout.evaluate.hidden_states import Indexed
from leadout.train import loader as module
from leadout.train.loader import PASSES_AHEAD, Loader, PassInput
from support.small_runs import KilledError, MakeRun


def item(number: int) -> Indexed:
    return number, TrainingSequence(f"{number}", "a", torch.tensor([number]), 0)


class Prepared:
    """Counts what the thread prepares; step n has n passes."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.fails_at = fails_at

    def parts_of(self, step: int) -> list[list[Indexed]]:
        return [[item(10 * step + number)] for number in range(step)]

    def prepare(self, part: Sequence[Indexed]) -> PassInput:
        step = part[0][0] // 10
        if step == self.fails_at:
            raise OSError("the disk is gone")
        self.steps.append(step)
        observed = Observation(torch.ones(1, 2, 6)[:, :, :4], torch.ones(1, 2, 2))
        return PassInput(part, observed)

    def loader(self, first: int = 0, end: int = 9, pinned: bool = False) -> Loader:
        return Loader(self.parts_of, self.prepare, first, end, pinned=pinned)


def numbers(loader: Loader, step: int) -> list[int]:
    count, inputs = loader.passes_of(step)
    found = [prepared.part[0][0] for prepared in inputs]
    assert len(found) == count
    return found


def test_passes_arrive_in_order_and_steps_may_have_none() -> None:
    with Prepared().loader() as loader:
        assert [numbers(loader, step) for step in range(4)] == [[], [10], [20, 21], [30, 31, 32]]


def test_the_thread_stays_a_few_passes_ahead() -> None:
    prepared = Prepared()
    with prepared.loader(first=3) as loader:
        _, inputs = loader.passes_of(3)
        next(inputs)
        time.sleep(0.3)
        # One was taken, some wait in the queue, and one waits for a place there.
        assert len(prepared.steps) <= PASSES_AHEAD + 2
    assert threading.active_count() == 1 or not any(
        thread.name == "loader" for thread in threading.enumerate()
    )


def test_an_error_of_the_thread_is_raised_in_the_loop() -> None:
    with Prepared(fails_at=2).loader() as loader:
        assert numbers(loader, 0) == []
        assert numbers(loader, 1) == [10]
        with pytest.raises(OSError, match="the disk is gone"):
            numbers(loader, 2)


def test_states_are_pinned_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def fake_pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.contiguous())
        return pinned[-1]

    monkeypatch.setattr(module, "_pin_memory", fake_pin_memory)
    with Prepared().loader(first=1, end=2, pinned=True) as loader:
        (prepared,) = loader.passes_of(1)[1]
    assert prepared.observed is not None
    assert prepared.observed.states is pinned[0]
    assert prepared.observed.final is pinned[1]


def test_states_on_disk_are_read_ahead_and_others_are_not(make_run: MakeRun) -> None:
    run = make_run(states="disk")
    part = [run.fetch(index) for index in run.corpus.split.train[:2]]
    assert run.gradient.prepare(part).observed is None  # not there yet: the device computes them
    expected = run.source.observe(part)
    observed = run.gradient.prepare(part).observed
    assert observed is not None
    assert torch.equal(observed.states, expected.states)
    assert make_run("computed").gradient.prepare(part).observed is None


def test_a_dead_run_leaves_no_thread(make_run: MakeRun) -> None:
    def dies(_: object) -> None:
        raise KilledError

    with pytest.raises(KilledError):
        make_run().train(dies)
    assert not any(thread.name == "loader" for thread in threading.enumerate())
