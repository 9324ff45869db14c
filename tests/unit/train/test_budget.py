"""Minutes or tokens become layers, anchors, batch and steps; a fake clock times the steps."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from leadout.cli.app import app
from leadout.data.manifest import DataFolder
from leadout.evaluate.acceptance import Acceptance, Validation
from leadout.evaluate.blocks import Split
from leadout.pairing.sizes import sizes_from_config
from leadout.shards import Samples, ShardWriter
from leadout.train import command
from leadout.train.budget import (
    BLOCKS_PER_LAYER,
    MAX_ANCHORS,
    MIN_STEPS,
    VALIDATIONS,
    Budget,
    choose_anchors,
    choose_batch,
    fit_to_budget,
    outlook,
    steps_for_seconds,
    steps_for_tokens,
    validations_for_seconds,
    with_steps,
)
from leadout.train.config import TrainConfig
from leadout.train.costs import StatesSource, Work
from leadout.train.loop import total_steps
from leadout.train.plan import Timing
from leadout.train.progress import ValidationRecord
from leadout.train.run import Corpus, Run
from support.learn_world import ANSWER, NEW, requests
from support.models import TINY_VOCAB
from support.small_runs import KilledError
from support.target_configs import CONFIGS

SETTINGS = TrainConfig(batch_sequences=10, states="disk", max_length=64)
# A pass over 100 sequences: 10 steps of one second, and 50 seconds for states; a validation: 0.1 s.
TIMING = Timing(seconds_per_step=1.0, seconds_per_token=0.5 / 40, seconds_per_validated=0.01)
ALL_VALIDATIONS = (1 + VALIDATIONS) * 0.1


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """A hundred sequences of 40 tokens to train on, and 10 to validate on."""
    with ShardWriter(tmp_path / "all.jsonl") as writer:
        for sample in requests(NEW, 110):
            writer.append(sample.model_copy(update={"prompt": sample.prompt[:6] + [1] * 10}))
    samples = Samples([writer.path])
    lengths = [len(sample.prompt) + len(sample.response) for sample in samples]
    assert set(lengths) == {40}
    parts = Split(list(range(100)), list(range(100, 110)))
    answers = [len(sample.response) for sample in samples]
    return Corpus(samples, parts, lengths, answers, torch.zeros(TINY_VOCAB), "")


def test_a_budget_includes_states_steps_and_validations(corpus: Corpus) -> None:
    assert steps_for_seconds(50 + 45 + ALL_VALIDATIONS, TIMING, SETTINGS, corpus) == 45


def test_a_short_budget_includes_only_the_states_it_needs(corpus: Corpus) -> None:
    # Half of the first pass: 5 steps and 25 seconds of states.
    assert steps_for_seconds(30 + ALL_VALIDATIONS, TIMING, SETTINGS, corpus) == 5
    assert steps_for_seconds(0.01, TIMING, SETTINGS, corpus) == 1


def test_the_time_of_a_step_includes_the_states_it_computes(corpus: Corpus) -> None:
    computed = SETTINGS.model_copy(update={"states": "compute"})
    assert steps_for_seconds(45 + ALL_VALIDATIONS, TIMING, computed, corpus) == 45


def test_validations_take_a_small_share_of_the_time(corpus: Corpus) -> None:
    slow = replace(TIMING, seconds_per_validated=1.0)  # 10 seconds each
    assert validations_for_seconds(1000, TIMING, corpus) == VALIDATIONS
    assert (
        validations_for_seconds(400, slow, corpus) == 3
    )  # and one before training: a tenth of the time
    assert validations_for_seconds(50, slow, corpus) == 1


def test_a_budget_includes_the_validations_that_were_asked_for(corpus: Corpus) -> None:
    computed = SETTINGS.model_copy(update={"states": "compute"})
    # A step and its validation take 1.1 s; the last step has one more.
    assert steps_for_seconds(45.5 * 1.1 + 0.1, TIMING, computed, corpus, validate_every=1) == 45
    frequent, _, _ = fitted(corpus, minutes=60, given=("validate_every",), validate_every=1)
    assert frequent.validate_every == 1


def test_validations_that_take_no_time_are_possible(corpus: Corpus) -> None:
    instant = replace(TIMING, seconds_per_validated=0.0)
    assert validations_for_seconds(10, instant, corpus) == VALIDATIONS


def test_a_token_budget_counts_answers_with_repetitions(corpus: Corpus) -> None:
    assert steps_for_tokens(100 * ANSWER * 3, SETTINGS, corpus) == 30
    assert steps_for_tokens(1, SETTINGS, corpus) == 1


@pytest.mark.parametrize("steps", [1, 7, 10, 123])
def test_the_schedule_has_the_requested_number_of_steps(corpus: Corpus, steps: int) -> None:
    settings = with_steps(SETTINGS, corpus, steps, VALIDATIONS)
    assert total_steps(len(corpus.split.train), settings) == steps
    assert steps / settings.validate_every <= VALIDATIONS


class FakeClock:
    """Times steps by the operations that they take, at a given rate."""

    def __init__(self, corpus: Corpus, operations_per_second: float) -> None:
        self.probes: list[TrainConfig] = []
        self._corpus = corpus
        self._rate = operations_per_second

    def __call__(self, config: TrainConfig) -> Timing:
        self.probes.append(config)
        operations = config.batch_sequences * work_of(config).operations("in process")
        return Timing(operations / self._rate, 0.0, 0.0001)


TARGET = sizes_from_config(CONFIGS["Qwen3-8B"], "target")


def work_of(config: TrainConfig) -> Work:
    assert config.layers is not None
    return Work.of(
        TARGET, layers=config.layers, taps=5, block_size=8, anchors=config.anchors, length=40.0
    )


def fitted(
    corpus: Corpus, rate: float = 1e14, *, given: tuple[str, ...] = (), **settings: Any
) -> tuple[TrainConfig, Budget, FakeClock]:
    config = TrainConfig(
        layers=5,
        target_layer_ids=(1, 9, 17, 25, 33),
        mask_token_id=9,
        states="compute",
        max_length=64,
        **settings,
    )
    clock = FakeClock(corpus, rate)
    chosen, budget = fit_to_budget(config, frozenset(given), TARGET, corpus, "in process", 1, clock)
    return chosen, budget, clock


def test_a_budget_of_minutes_is_used_exactly(corpus: Corpus) -> None:
    chosen, budget, clock = fitted(corpus, minutes=60)
    assert (chosen.minutes, chosen.tokens) == (None, None)  # the settings repeat the run
    assert total_steps(len(corpus.split.train), chosen) == budget.steps
    timing = clock(chosen)
    assert 3500 < budget.steps * timing.seconds_per_step <= 3600
    assert budget.seconds_per_step == pytest.approx(timing.seconds_per_step)
    assert "60 minutes allow" in budget.text()


def test_more_minutes_are_never_less_training(corpus: Corpus) -> None:
    found = [fitted(corpus, 1e13, minutes=minutes)[0] for minutes in (0.1, 1, 10, 100, 1000, 9000)]
    layers = [config.layers for config in found]
    assert layers == sorted(layers)
    assert (layers[0], layers[-1]) == (1, 5)
    batches = [config.batch_sequences for config in found]
    assert batches == sorted(batches)
    spent = [
        total_steps(100, config) * config.batch_sequences * work_of(config).operations("in process")
        for config in found
    ]
    assert spent == sorted(spent)


def test_a_faster_machine_takes_more_steps(corpus: Corpus) -> None:
    slow, fast = (
        fitted(corpus, rate, minutes=100, given=("layers", "batch_sequences"))[1].steps
        for rate in (1e14, 1e15)
    )
    assert fast == pytest.approx(10 * slow, rel=0.01)


def test_layers_need_blocks_and_a_schedule_needs_steps(corpus: Corpus) -> None:
    chosen, budget, _ = fitted(corpus, 1e13, minutes=10)
    blocks = budget.steps * chosen.batch_sequences * chosen.anchors
    assert chosen.layers is not None
    assert chosen.layers == 1 or blocks >= 0.9 * chosen.layers * BLOCKS_PER_LAYER
    short, _, clock = fitted(corpus, 1e13, minutes=1)
    assert short.batch_sequences < clock.probes[0].batch_sequences
    assert len(clock.probes) == 2  # timed again with the smaller batch
    assert fitted(corpus, 1e13, minutes=100)[1].steps >= MIN_STEPS


def test_a_trained_drafter_keeps_its_layers(corpus: Corpus) -> None:
    assert fitted(corpus, 1e13, minutes=0.1)[0].layers == 1
    assert fitted(corpus, 1e13, minutes=0.1, initial="drafter")[0].layers == 5


def test_what_the_user_gave_is_kept(corpus: Corpus) -> None:
    given = {"layers": 3, "anchors": 7, "batch_sequences": 6, "validate_every": 11}
    config = TrainConfig(
        target_layer_ids=(1, 2),
        mask_token_id=9,
        states="compute",
        max_length=64,
        tokens=10,
        **given,
    )
    chosen, _ = fit_to_budget(
        config,
        frozenset(given),
        TARGET,
        corpus,
        "in process",
        1,
        FakeClock(corpus, 1.0),
    )
    assert {name: getattr(chosen, name) for name in given} == given


def test_a_budget_of_tokens_needs_no_clock(corpus: Corpus) -> None:
    chosen, budget, clock = fitted(corpus, tokens=100 * ANSWER * 30)
    assert clock.probes == []
    assert budget.seconds_per_step is None
    assert chosen.passes == pytest.approx(30, rel=0.01)


@pytest.mark.parametrize("name", CONFIGS)
def test_anchors_cost_about_as_much_as_the_rest(name: str) -> None:
    work = Work.of(
        sizes_from_config(CONFIGS[name], name),
        layers=5,
        taps=5,
        block_size=8,
        anchors=1,
        length=2000.0,
    )
    sources: tuple[StatesSource, ...] = ("in process", "served", "disk")
    found = [choose_anchors(work, source, positions=1500) for source in sources]
    assert found[0] == found[1] >= found[2]  # reading states is cheap
    for count in found:
        assert count.bit_count() == 1
        assert 16 <= count <= MAX_ANCHORS
    assert choose_anchors(work, "in process", positions=5) == 2


def test_a_batch_has_as_many_sequences_on_every_rank() -> None:
    assert [choose_batch(anchors, 1) for anchors in (16, 64, 256, 512)] == [64, 64, 16, 8]
    assert [choose_batch(512, ranks) for ranks in (3, 8, 16)] == [9, 8, 16]


def record(step: int, length: float) -> ValidationRecord:
    each = Acceptance(
        acceptance_length=length, by_position=[0.5], steps=100, every_position=2.0, positions=99
    )
    return ValidationRecord(
        step=step, seconds=1.0, validation=Validation(overall=each, by_source={"all": each})
    )


EPOCHS = 3.0
FALLING = [3.0 - 0.01 * step for step in range(100)]


def test_the_curve_of_a_run_says_what_more_blocks_bring() -> None:
    doubling = [record(100 * 2**k, 1.5 + 0.2 * k) for k in range(7)]
    found = outlook(doubling, FALLING, EPOCHS, 100.0, positions=10_000_000)
    assert found.epochs == EPOCHS
    assert found.per_doubling == pytest.approx(0.2)
    assert found.visits == pytest.approx(0.064)
    assert "about +0.20 tokens" in found.text()
    assert "more time is enough" in found.text()
    used_up = outlook(doubling, FALLING, EPOCHS, 100.0, positions=1000)
    assert "more time or more data is not known" in used_up.text()


@pytest.mark.parametrize(
    "lengths",
    [[], [1.5], [1.5, 1.6, 1.7], [1.8, 1.8, 1.8, 1.8, 1.8, 1.8], [1.5, 1.9, 1.4, 1.8, 1.5, 1.7]],
)
def test_what_a_curve_does_not_support_is_not_known(lengths: list[float]) -> None:
    points = [record(100 * 2**k, length) for k, length in enumerate(lengths)]
    found = outlook(points, [], EPOCHS, 100.0, positions=1000)
    assert found.per_doubling is None
    assert "not known from this run" in found.text()


def test_a_falling_curve_asks_for_data() -> None:
    points = [record(100 * 2**k, length) for k, length in enumerate([1.5, 1.8, 1.9, 1.7, 1.6, 1.5])]
    found = outlook(points, FALLING, EPOCHS, 100.0, positions=1000)
    assert found.overfits
    assert "more data may" in found.text()


# The command.

Invoke = Callable[..., str]


@pytest.fixture
def begin(
    target_folder: Path, data: DataFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Invoke:
    """Runs `leadout train` up to its first step; returns stderr."""

    def dies(*_: object) -> None:
        raise KilledError

    monkeypatch.setattr(Run, "train", dies)
    monkeypatch.setattr(command, "time_steps", lambda _: Timing(0.5, 0.001, 0.01))
    flags = ["--block-size", "5", "--max-length", "64", "--validation-sequences", "4"]
    flags += ["--precision", "float32"]

    def run(*words: str) -> str:
        place = ["--data", str(data.folder), "--out", str(tmp_path / "out")]
        arguments = ["train", str(target_folder), *place, *flags, *words]
        try:
            return str(CliRunner().invoke(app, arguments).stderr)
        except KilledError:
            return ""

    return run


def test_a_continued_run_keeps_what_was_chosen_for_its_budget(
    begin: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin("--minutes", "2")
    path = tmp_path / "out" / "training.yaml"
    first = TrainConfig.resolve({}, path)
    budget = json.loads((tmp_path / "out" / "run" / "budget.json").read_text())
    assert budget["minutes"] == 2
    assert (first.anchors, first.layers) == (budget["anchors"], budget["layers"])
    assert first.minutes is None
    # On a machine of another speed, with and without the flag, and with another file.
    monkeypatch.setattr(command, "time_steps", lambda _: Timing(99.0, 1.0, 1.0))
    (tmp_path / "given.yaml").write_text("seed: 0\n")
    for words in ((), ("--minutes", "2"), ("--config", str(tmp_path / "given.yaml"))):
        assert begin("--resume", *words) == ""
        assert TrainConfig.resolve({}, path) == first
    assert "--minutes 3 differs from the run" in begin("--resume", "--minutes", "3")
    assert "was started with another budget" in begin("--resume", "--tokens", "3")


def test_a_continued_run_keeps_where_its_states_come_from(begin: Invoke, tmp_path: Path) -> None:
    """They would be read once only: the budget has set less than an epoch."""
    begin("--tokens", "3")
    path = tmp_path / "out" / "training.yaml"
    first = TrainConfig.resolve({}, path)
    assert first.passes < 1
    assert first.states == "compute"
    (tmp_path / "given.yaml").write_text("seed: 0\n")
    assert begin("--resume", "--tokens", "3", "--config", str(tmp_path / "given.yaml")) == ""
    assert TrainConfig.resolve({}, path) == first


def test_the_device_is_free_after_steps_are_timed(
    begin: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[weakref.ref[Any]] = []
    held: list[int] = []

    def watched(run: Run) -> Timing:
        timed.extend(map(weakref.ref, [run.target_weights.head, *run.weights.masters.values()]))
        return Timing(0.5, 0.001, 0.01)

    def starts(*_: object) -> None:
        held.append(sum(each() is not None for each in timed))
        raise KilledError

    monkeypatch.setattr(command, "time_steps", watched)
    monkeypatch.setattr(Run, "train", starts)
    begin("--minutes", "2")
    assert timed
    assert held == [0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--minutes", "5", "--epochs", "2"), "--epochs 2 and --minutes 5 both set the number"),
        (("--tokens", "500", "--epochs", "2"), "--epochs 2 and --tokens 500 both set the number"),
        (("--minutes", "5", "--tokens", "500"), "--minutes and --tokens are two budgets"),
        (("--minutes", "0"), "--minutes"),
    ],
)
def test_contradictory_budgets_are_refused(
    begin: Invoke, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    assert message in begin(*words)
    assert not (tmp_path / "out").exists()
