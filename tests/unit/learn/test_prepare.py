"""A cycle trains with the drafter's own shape, and as many steps as the budget allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leadout.checkpoints import read_checkpoint
from leadout.evaluate.blocks import Split
from leadout.learn.config import CycleSettings, LearnConfig, LearnError
from leadout.learn.prepare import (
    VALIDATIONS,
    WorkFolder,
    base_settings,
    require_learnable,
    steps_for_seconds,
    steps_for_tokens,
    validations_for_seconds,
    with_steps,
)
from leadout.settings import SettingsError
from leadout.shards import Samples, ShardWriter
from leadout.train.config import TrainConfig
from leadout.train.init import reduce_draft_vocab
from leadout.train.loop import total_steps
from leadout.train.plan import Timing
from leadout.train.run import Corpus
from support.learn_world import ANSWER, NEW, World, requests
from support.models import TINY_VOCAB

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
    return Corpus(samples, parts, lengths, torch.zeros(TINY_VOCAB), "")


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


def test_a_token_budget_counts_answers_with_repetitions(corpus: Corpus) -> None:
    assert steps_for_tokens(100 * ANSWER * 3, SETTINGS, corpus) == 30
    assert steps_for_tokens(1, SETTINGS, corpus) == 1


@pytest.mark.parametrize("steps", [1, 7, 10, 123])
def test_the_schedule_has_the_requested_number_of_steps(corpus: Corpus, steps: int) -> None:
    settings = with_steps(SETTINGS, corpus, steps, VALIDATIONS)
    assert total_steps(len(corpus.split.train), settings) == steps
    assert steps / settings.validate_every <= VALIDATIONS


def test_training_uses_the_drafters_own_shape_and_settings(world: World) -> None:
    checkpoint = read_checkpoint(world.drafter)
    settings = base_settings(checkpoint, CycleSettings(), 128, seed=3)
    assert settings.block_size == checkpoint.config.block_size == 5
    assert settings.target_layer_ids == checkpoint.config.target_layer_ids
    assert settings.initial == str(world.drafter)
    assert settings.anchors == 12  # of its training.yaml
    assert settings.learning_rate == pytest.approx(2.5e-3)
    assert (settings.max_length, settings.precision, settings.seed) == (128, "float32", 3)
    faster = base_settings(checkpoint, CycleSettings(learning_rate=0.1), 128, seed=3)
    assert faster.learning_rate == 0.1


def test_a_drafter_with_a_reduced_vocabulary_is_an_error(world: World, tmp_path: Path) -> None:
    answers = [sample.response for sample in world.data.samples()]
    reduced, _ = reduce_draft_vocab(world.drafter, tmp_path / "reduced", world.target, answers, 30)
    with pytest.raises(LearnError, match=r"its own head \(30 rows\).*--draft-vocab"):
        require_learnable(reduced)
    require_learnable(read_checkpoint(world.drafter))


def test_two_budgets_are_an_error() -> None:
    with pytest.raises(SettingsError, match="--minutes and --tokens are two budgets"):
        LearnConfig.resolve({"registry": "r", "minutes": 1.0, "tokens": 5})
    with pytest.raises(SettingsError, match="--held-out: got 2"):
        LearnConfig.resolve({"registry": "r", "held_out": 2.0, "tokens": None})


def test_settings_of_earlier_files_are_readable() -> None:
    """The minimum number of requests had another name."""
    recorded = CycleSettings(min_requests=20).model_dump(mode="json")
    recorded["least_requests"] = recorded.pop("min_requests")
    assert CycleSettings.model_validate(recorded) == CycleSettings(min_requests=20)


def test_the_recorded_settings_have_no_folders(tmp_path: Path) -> None:
    config = LearnConfig(registry=tmp_path, gain=0.1)
    assert config.cycle == CycleSettings(gain=0.1)
    assert set(config.cycle.model_dump()) == set(CycleSettings.model_fields)
    assert config.work_folder == tmp_path / "work"


def test_a_work_folder_is_for_one_cycle_at_a_time(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path / "work")
    with work.locked():
        assert (tmp_path / "work").stat().st_mode & 0o777 == 0o700
        with (
            pytest.raises(LearnError, match="in use by another cycle"),
            WorkFolder(tmp_path / "work").locked(),
        ):
            pass
    with work.locked():
        pass
