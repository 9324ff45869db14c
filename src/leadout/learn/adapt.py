"""How the serving drafter goes on learning: its own shape and settings, within a budget."""

from __future__ import annotations

import math
from pathlib import Path

from leadout.checkpoints import Checkpoint
from leadout.learn.config import LearnConfig, LearnError
from leadout.train.config import TrainConfig
from leadout.train.export import SETTINGS
from leadout.train.loop import total_steps
from leadout.train.plan import Timing
from leadout.train.run import Corpus

VALIDATIONS = 8  # over a run, and one before it ...
VALIDATION_SHARE = 0.1  # ... but fewer if they would take more of the time than this
RATE_SHARE = 0.5  # of the learning rate that the drafter was trained with


def first_settings(drafter: Path) -> TrainConfig:
    """What the drafter was first trained with, as far as it tells."""
    path = drafter / SETTINGS
    return TrainConfig.resolve(path if path.exists() else None, {})


def require_learnable(checkpoint: Checkpoint) -> None:
    """Training moves what a drafter owns, and reads the target's own embedding and head."""
    config = checkpoint.config
    if not (config.own_head or config.own_embedding):
        return
    what = "head" if config.own_head else "embedding"
    rows = f" ({config.head_rows} rows)" if config.draft_vocab_size else ""
    raise LearnError(
        f"{checkpoint.path}: found a drafter with its own {what}{rows}, wanted one that borrows "
        "the target's; start the registry with the drafter that it was made from, and make the "
        "reduced one from each promoted version with `leadout convert --draft-vocab`"
    )


def settings_for(
    checkpoint: Checkpoint, config: LearnConfig, max_length: int, seed: int
) -> TrainConfig:
    """The settings of a cycle, all but its number of steps."""
    first, shape = first_settings(checkpoint.path), checkpoint.config
    precision = str(checkpoint.tensors.dtype).removeprefix("torch.")
    return first.model_copy(
        update={
            "layers": shape.num_layers,
            "block_size": shape.block_size,
            "target_layer_ids": shape.target_layer_ids,
            "mask_token_id": shape.mask_token_id,
            "initial": str(checkpoint.path),
            "max_length": max_length,
            "learning_rate": config.learning_rate or RATE_SHARE * first.learning_rate,
            "precision": precision if precision == "float32" else "bfloat16",
            "states": "auto",
            "patience": None,
            "compile": False,  # takes minutes, of which there are few
            "seed": seed,
        }
    )


def with_steps(settings: TrainConfig, corpus: Corpus, steps: int, validations: int) -> TrainConfig:
    """The same for so many steps; the learning rate falls to zero over them."""
    epochs = steps * settings.batch_sequences / len(corpus.split.train)
    every = max(1, math.ceil(steps / validations))
    changed = settings.model_copy(update={"epochs": epochs, "validate_every": every})
    assert total_steps(len(corpus.split.train), changed) == steps
    return changed


def steps_for_tokens(tokens: int, settings: TrainConfig, corpus: Corpus) -> int:
    train = corpus.split.train
    answered = sum(
        corpus.lengths[index] - min(len(corpus.samples[index].prompt), settings.max_length)
        for index in train
    )
    return max(1, round(tokens * len(train) / answered / settings.batch_sequences))


def validations_within(seconds: float, timing: Timing, corpus: Corpus) -> int:
    each = len(corpus.split.validation) * timing.seconds_per_judged
    return max(1, min(VALIDATIONS, int(VALIDATION_SHARE * seconds / each) - 1))


def steps_within(seconds: float, timing: Timing, settings: TrainConfig, corpus: Corpus) -> int:
    """As many as fit, with the target's states and the validations that belong to them."""
    validations = 1 + validations_within(seconds, timing, corpus)
    seconds -= validations * len(corpus.split.validation) * timing.seconds_per_judged
    train = corpus.split.train
    of_states = timing.seconds_per_token * sum(corpus.lengths[i] for i in set(train))
    per_pass = timing.seconds_per_step * len(train) / settings.batch_sequences
    if settings.states != "disk":  # steps compute their own, and were timed with them
        passes = seconds / per_pass
    else:  # the first pass computes them
        passes = min(seconds / (per_pass + of_states), 1.0)
        passes += max(0.0, seconds - per_pass - of_states) / per_pass
    return max(1, int(passes * len(train) / settings.batch_sequences))
