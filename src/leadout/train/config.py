"""The settings of `leadout train`, and the error for runs that cannot start or continue."""

from __future__ import annotations

from typing import Literal

from leadout.errors import LeadoutError
from leadout.settings import Settings, setting


class TrainError(LeadoutError):
    """A training run that cannot start, continue or finish as requested."""


class TrainConfig(Settings):
    """All settings of a training run.

    None and "auto" mean: chosen from the target and the data. What was chosen is written back, so
    that the resolved file repeats the run.
    """

    command = "train"

    layers: int | None = setting(
        None,
        "Draft layers. [default: 2 for targets below 1B parameters, else 5]",
        panel="Drafter",
        ge=1,
    )
    block_size: int = setting(
        8,
        "Tokens of a block: one that is known and the drafts that follow it.",
        panel="Drafter",
        ge=2,
    )
    target_layer_ids: tuple[int, ...] | None = setting(
        None,
        "Target layer whose hidden states the drafter reads; repeatable. [default: 5 layers, "
        "evenly spaced]",
        panel="Drafter",
    )
    mask_token_id: int | None = setting(
        None,
        "Token id for positions to be drafted. [default: one that the data does not use]",
        panel="Drafter",
        ge=0,
    )
    initial: str = setting(
        "random",
        "Initial weights: `random`, or the folder of a drafter of the same shape.",
        panel="Drafter",
    )

    distillation: float = setting(
        0.5,
        "Weight of the target's distribution in the labels; the rest is on the target's token.",
        panel="Objective",
        ge=0,
        le=1,
    )
    position_weights: Literal["dpace", "exponential"] = setting(
        "dpace", "How positions in a block are weighted in the loss.", panel="Objective"
    )
    gamma: float = setting(
        4.0,
        "Decay of exponential weights: positions until the weight is 1/e.",
        panel="Objective",
        gt=0,
    )
    dpace_alpha: float = setting(
        0.5,
        "Lower bound on a draft's acceptance probability in D-PACE weights.",
        panel="Objective",
        ge=0,
        le=1,
    )
    candidates: int | None = setting(
        None,
        "Compute the loss over this many frequent tokens only. [default: the whole vocabulary]",
        panel="Objective",
        ge=1,
    )

    max_length: int = setting(
        2048, "Maximum sequence length in tokens; longer samples are cut.", panel="Data", ge=8
    )
    anchors: int = setting(64, "Draft blocks per sequence and step.", panel="Data", ge=1)
    validation_sequences: int = setting(
        96, "Greedy samples held out for validation, over all sources.", panel="Data", ge=1
    )

    optimizer: Literal["muon", "adamw"] = setting(
        "muon", "Muon for matrices and AdamW for the rest, or AdamW for all.", panel="Optimizer"
    )
    learning_rate: float = setting(1e-3, "Peak learning rate.", panel="Optimizer", gt=0)
    warmup: float = setting(
        0.04, "Share of the steps for linear warmup.", panel="Optimizer", ge=0, lt=1
    )
    weight_decay: float = setting(0.01, "Weight decay of matrices.", panel="Optimizer", ge=0)
    clip: float = setting(1.0, "Maximum gradient norm.", panel="Optimizer", gt=0)
    batch_sequences: int = setting(
        64, "Sequences per step, over all processes.", panel="Optimizer", ge=1
    )
    epochs: float = setting(6.0, "Passes over the data.", panel="Optimizer", gt=0)
    precision: Literal["bfloat16", "float32"] = setting(
        "bfloat16", "Precision of matrix products; master weights are float32.", panel="Optimizer"
    )

    micro_tokens: int = setting(
        16384, "Maximum tokens per forward pass; lower it if memory is short.", panel="Run", ge=1
    )
    states: Literal["auto", "compute", "disk"] = setting(
        "auto",
        "Target hidden states: computed in every step, or once and kept on disk (auto: with "
        "more than one epoch).",
        panel="Run",
    )
    validate_every: int = setting(100, "Steps between validations.", panel="Run", ge=1)
    save_every: int = setting(50, "Steps between checkpoints.", panel="Run", ge=1)
    patience: int | None = setting(
        None, "Stop early after this many validations without improvement.", panel="Run", ge=1
    )
    compile: bool = setting(
        False, "Compile the drafter; pads every sequence to --max-length.", panel="Run"
    )
    seed: int = setting(0, "Seed of anchors, sample order and initial weights.", panel="Run")
