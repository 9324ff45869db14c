"""How the serving drafter goes on: its own shape, and as many steps as the budget allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leadout.checkpoints import read_checkpoint
from leadout.evaluate.blocks import Split
from leadout.learn.config import LearnConfig, LearnError
from leadout.learn.prepare import (
    VALIDATIONS,
    require_learnable,
    settings_for,
    steps_for_tokens,
    steps_within,
    validations_within,
    with_steps,
)
from leadout.settings import SettingsError
from leadout.shards import Samples, ShardWriter
from leadout.train.config import TrainConfig
from leadout.train.draft_vocab import reduce_draft_vocab
from leadout.train.loop import total_steps
from leadout.train.plan import Timing
from leadout.train.run import Corpus
from support.learn_world import ANSWER, NEW, World, requests
from support.models import TINY_VOCAB

SETTINGS = TrainConfig(batch_sequences=10, states="disk", max_length=64)
# A pass over 100 sequences: 10 steps of a second, and 50 seconds for states; a validation: 0.1.
TIMING = Timing(seconds_per_step=1.0, seconds_per_token=0.5 / 40, seconds_per_validated=0.01)
ALL_VALIDATIONS = (1 + VALIDATIONS) * 0.1


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """A hundred sequences of 40 tokens to train on, and 10 to validate by."""
    with ShardWriter(tmp_path / "all.jsonl") as writer:
        for sample in requests(NEW, 110):
            writer.append(sample.model_copy(update={"prompt": sample.prompt[:6] + [1] * 10}))
    samples = Samples([writer.path])
    lengths = [len(sample.prompt) + len(sample.response) for sample in samples]
    assert set(lengths) == {40}
    parts = Split(list(range(100)), list(range(100, 110)))
    return Corpus(samples, parts, lengths, torch.zeros(TINY_VOCAB), "")


def test_a_budget_holds_states_steps_and_validations(corpus: Corpus) -> None:
    assert steps_within(50 + 45 + ALL_VALIDATIONS, TIMING, SETTINGS, corpus) == 45


def test_a_short_budget_pays_only_for_the_states_it_needs(corpus: Corpus) -> None:
    # Half of the first pass: 5 steps and 25 seconds of states.
    assert steps_within(30 + ALL_VALIDATIONS, TIMING, SETTINGS, corpus) == 5
    assert steps_within(0.01, TIMING, SETTINGS, corpus) == 1


def test_states_that_steps_compute_are_in_their_time(corpus: Corpus) -> None:
    anew = SETTINGS.model_copy(update={"states": "compute"})
    assert steps_within(45 + ALL_VALIDATIONS, TIMING, anew, corpus) == 45


def test_validations_never_take_most_of_the_time(corpus: Corpus) -> None:
    slow = replace(TIMING, seconds_per_validated=1.0)  # 10 seconds each
    assert validations_within(1000, TIMING, corpus) == VALIDATIONS
    assert validations_within(400, slow, corpus) == 3  # and one before: a tenth of the time
    assert validations_within(50, slow, corpus) == 1


def test_tokens_count_answers_with_repetitions(corpus: Corpus) -> None:
    assert steps_for_tokens(100 * ANSWER * 3, SETTINGS, corpus) == 30
    assert steps_for_tokens(1, SETTINGS, corpus) == 1


@pytest.mark.parametrize("steps", [1, 7, 10, 123])
def test_the_schedule_fits_the_steps(corpus: Corpus, steps: int) -> None:
    settings = with_steps(SETTINGS, corpus, steps, VALIDATIONS)
    assert total_steps(len(corpus.split.train), settings) == steps
    assert steps / settings.validate_every <= VALIDATIONS


def test_it_goes_on_with_the_drafters_own_shape_and_settings(world: World) -> None:
    checkpoint = read_checkpoint(world.drafter)
    settings = settings_for(checkpoint, LearnConfig(), 128, seed=3)
    assert settings.block_size == checkpoint.config.block_size == 5
    assert settings.target_layer_ids == checkpoint.config.target_layer_ids
    assert settings.initial == str(world.drafter)
    assert settings.anchors == 12  # of its training.yaml
    assert settings.learning_rate == pytest.approx(2.5e-3)
    assert (settings.max_length, settings.precision, settings.seed) == (128, "float32", 3)
    faster = settings_for(checkpoint, LearnConfig(learning_rate=0.1), 128, seed=3)
    assert faster.learning_rate == 0.1


def test_a_drafter_with_a_reduced_vocabulary_is_refused(world: World, tmp_path: Path) -> None:
    answers = [sample.response for sample in world.data.samples()]
    narrowed, _ = reduce_draft_vocab(world.drafter, tmp_path / "narrow", world.target, answers, 30)
    with pytest.raises(LearnError, match=r"its own head \(30 rows\).*--draft-vocab"):
        require_learnable(narrowed)
    require_learnable(read_checkpoint(world.drafter))


def test_two_budgets_are_refused() -> None:
    with pytest.raises(SettingsError, match="--minutes and --tokens are two budgets"):
        LearnConfig.resolve({"minutes": 1.0, "tokens": 5})
    with pytest.raises(SettingsError, match="--held-out: got 2"):
        LearnConfig.resolve({"held_out": 2.0, "tokens": None})
