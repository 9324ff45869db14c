"""Exact resume after a kill, best weights, early stopping, and the samples of each step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from leadout.evaluate import hidden_states
from leadout.evaluate.acceptance import Acceptance, Validation
from leadout.leftovers import temporary_path
from leadout.train.gradient import StepResult
from leadout.train.loader import PassInput
from leadout.train.loop import TrainingInterrupted, sequences_of_step, total_steps
from leadout.train.progress import LOG, Record, StepRecord, ValidationRecord, read_log
from leadout.train.run import Run
from leadout.train.state import STATE, load_best
from support.small_runs import KilledError, MakeRun, small_config

STEPS = 7  # of a small run


def silent(_: Record) -> None:
    pass


def dies_at(step: int, kind: type[Record] = StepRecord) -> Callable[[Record], None]:
    def listen(record: Record) -> None:
        if isinstance(record, kind) and record.step == step:
            raise KilledError

    return listen


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in run.weights.named().items()}


@pytest.mark.parametrize(("optimizer", "states"), [("muon", "disk"), ("adamw", "compute")])
def test_a_resumed_run_equals_an_uninterrupted_one(
    make_run: MakeRun, optimizer: str, states: str
) -> None:
    settings = {"optimizer": optimizer, "states": states}
    whole = make_run("whole", **settings)
    expected = whole.train(silent)
    assert expected.step == whole.steps == STEPS
    for listen in (
        dies_at(1),  # before the first checkpoint
        dies_at(4),  # its step is logged, but not saved
        dies_at(6, ValidationRecord),  # the best weights are newer than the state
    ):
        with pytest.raises(KilledError):
            make_run("killed", **settings).train(listen)
    last = make_run("killed", **settings)
    found = last.train(silent)
    assert (found.step, found.best_step) == (expected.step, expected.best_step)
    assert found.best_acceptance == expected.best_acceptance
    for name, weight in weights_of(whole).items():
        torch.testing.assert_close(last.weights.named()[name], weight, atol=1e-6, rtol=1e-5)
    for name, weight in load_best(whole.folder).items():
        torch.testing.assert_close(load_best(last.folder)[name], weight, atol=1e-6, rtol=1e-5)
    logs = [list(read_log(run.folder)) for run in (whole, last)]
    assert [(r.kind, r.step) for r in logs[0]] == [(r.kind, r.step) for r in logs[1]]
    steps = [[r for r in log if isinstance(r, StepRecord)] for log in logs]
    assert [r.step for r in steps[1]] == [1, 2, 3, 4, 5, 6, 7]
    for undisturbed, resumed in zip(*steps, strict=True):
        assert resumed.loss == pytest.approx(undisturbed.loss, rel=1e-5)
        assert resumed.learning_rate == undisturbed.learning_rate


def test_bfloat16_runs_resume_from_float32_master_weights(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "_has_bfloat16", lambda: True)  # emulated is the same
    settings = {"precision": "bfloat16", "epochs": 0.4, "validate_every": 99}
    whole = make_run("whole", **settings)
    whole.train(silent)
    with pytest.raises(KilledError):
        make_run("killed", **settings).train(dies_at(3))
    last = make_run("killed", **settings)
    last.train(silent)
    for name, weight in weights_of(whole).items():
        assert weight.dtype == torch.float32
        assert torch.equal(last.weights.named()[name], weight)
        parameter = dict(last.drafter.named_parameters())[name]
        assert torch.equal(parameter, weight.bfloat16())
    assert any(not torch.equal(w, w.bfloat16().float()) for w in weights_of(whole).values())


@pytest.mark.parametrize("place", ["before the update", "after the update"])
def test_an_interrupted_run_saves_its_last_complete_step_and_resumes_exactly(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    whole = make_run("whole")
    whole.train(silent)
    stopped = make_run("stopped", save_every=100)

    def interrupts(record: Record) -> None:
        if place == "after the update" and record.step == 4:
            raise KeyboardInterrupt

    add = stopped.gradient.add

    def interrupted_in_fifth_step(
        inputs: Iterable[PassInput], count: int, step: int, denominator: float
    ) -> StepResult:
        result = add(inputs, count, step, denominator)
        if step == 4:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(stopped.gradient, "add", interrupted_in_fifth_step)
    with pytest.raises(TrainingInterrupted) as caught:
        stopped.train(interrupts)
    # A step is complete only once it is logged and, where due, validated.
    assert caught.value.saved_step == (4 if place == "before the update" else 0)
    assert caught.value.steps == STEPS
    resumed = make_run("stopped", save_every=100)
    resumed.train(silent)
    for name, weight in weights_of(whole).items():
        torch.testing.assert_close(resumed.weights.named()[name], weight, atol=1e-6, rtol=1e-5)
    logs = [[(r.kind, r.step) for r in read_log(run.folder)] for run in (whole, resumed)]
    assert logs[0] == logs[1]


def test_a_finished_run_is_not_trained_further(make_run: MakeRun) -> None:
    first = make_run()
    numbers = first.train(silent)
    before = (first.folder / STATE).read_bytes()
    again = make_run().train(dies_at(1))
    assert again == numbers
    assert (first.folder / STATE).read_bytes() == before


def test_partial_log_lines_and_checkpoints_are_removed(make_run: MakeRun) -> None:
    with pytest.raises(KilledError):
        make_run().train(dies_at(3))
    run = make_run()
    own = temporary_path(run.folder / STATE)
    no_process = 2**22 + 1  # larger than any process id
    torn = own.with_name(own.name.replace(f"-{os.getpid()}-", f"-{no_process}-"))
    torn.write_bytes(b"half of a checkpoint")
    with (run.folder / LOG).open("a") as log:
        log.write('{"kind":"step","step":4,"sec')
    run.train(silent)
    assert [r.step for r in read_log(run.folder) if r.kind == "step"] == [1, 2, 3, 4, 5, 6, 7]
    assert not torn.exists()


def validations(values: list[float]) -> Callable[[], Validation]:
    left = iter(values)

    def validate() -> Validation:
        value = Acceptance(
            acceptance_length=next(left), by_position=[], steps=1, every_position=1, positions=1
        )
        return Validation(overall=value, by_source={"a": value})

    return validate


def test_the_best_weights_are_those_with_the_highest_acceptance(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(validate_every=1)
    monkeypatch.setattr(run, "validate", validations([1.1, 1.5, 1.3, 1.5, 1.2, 1.4, 1.0]))
    seen: dict[int, torch.Tensor] = {}

    def listen(record: Record) -> None:
        seen.setdefault(record.step, run.weights.named()["fc.weight"].clone())

    numbers = run.train(listen)
    assert (numbers.best_step, numbers.best_acceptance) == (2, 1.5)
    assert torch.equal(load_best(run.folder)["fc.weight"], seen[2])
    assert not torch.equal(seen[2], seen[7])
    assert torch.equal(load_file(run.folder / STATE)["weights.fc.weight"], seen[7])


def test_training_stops_when_patience_runs_out(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(validate_every=1, patience=2)
    monkeypatch.setattr(run, "validate", validations([1.1, 1.0, 1.3, 1.2, 1.3, 9.9]))
    numbers = run.train(silent)
    assert (numbers.step, numbers.best_step, numbers.finished) == (5, 3, True)
    assert make_run(validate_every=1, patience=2).train(dies_at(6)) == numbers


def test_the_log_is_json_lines(make_run: MakeRun) -> None:
    run = make_run()
    run.train(silent)
    records = list(read_log(run.folder))
    found = [r for r in records if isinstance(r, ValidationRecord)]
    assert [r.step for r in found] == [3, 6, 7]  # every third, and at the end
    assert all(r.loss > 0 and r.gradient_norm > 0 for r in records if isinstance(r, StepRecord))
    assert [r.seconds for r in records] == sorted(r.seconds for r in records)


def test_every_epoch_takes_every_sample_once_in_a_new_order() -> None:
    train = list(range(100, 123))
    config = small_config(batch_sequences=5)
    stream = [i for step in range(14) for i in sequences_of_step(train, step, config)]
    passes = [stream[:23], stream[23:46], stream[46:69]]
    assert all(sorted(each) == train for each in passes)
    assert passes[0] != passes[1] != passes[2]
    other = small_config(batch_sequences=5, seed=1)
    assert sequences_of_step(train, 0, other) != sequences_of_step(train, 0, config)
    assert len(sequences_of_step(train[:2], 0, config)) == 5  # more than there are
    assert total_steps(23, small_config(epochs=2, batch_sequences=5)) == 9


def test_states_stay_in_the_folder_of_the_run(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(states="disk").train(silent)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
