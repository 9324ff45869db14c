"""The settings of `leadout train`, and the error for runs that cannot start or continue."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from leadout.errors import LeadoutError
from leadout.settings import Settings, setting

DEFAULT_EPOCHS = 6.0


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
    mlp_width: int | None = setting(
        None,
        "Width of the draft layers' MLPs; narrow ones make a smaller file and faster drafts. "
        "[default: the target's]",
        panel="Drafter",
        ge=1,
    )
    draft_vocab: int | None = setting(
        None,
        "Let the drafter draft only the most frequent tokens of the answers, this many, with an "
        "output head for them; with a large vocabulary the target's head is most of the cost of "
        "drafting. [default: the whole vocabulary]",
        panel="Drafter",
        ge=1,
    )
    block_size: int = setting(
        8,
        "Tokens of a block: one that is known and the drafts that follow it.",
        panel="Drafter",
        ge=2,
    )
    first_block_size: int | None = setting(
        None,
        "Tokens of a block in the first part of a run, less than --block-size: shorter blocks "
        "take less time, and decoding reaches their drafts most often. [default: --block-size]",
        panel="Objective",
        ge=2,
    )
    first_block_share: float = setting(
        0.7, "Share of the steps with --first-block-size.", panel="Objective", gt=0, lt=1
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

    window: int | None = setting(
        None,
        "Sliding window of the draft layers in tokens, which are then causal within a block. "
        "[default: they see the whole context]",
        panel="Drafter",
        ge=1,
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
    anchors_per_token: float | None = setting(
        None,
        "Draft blocks per answer token and step, from 8 to 512 per sequence, instead of --anchors.",
        panel="Data",
        gt=0,
        le=1,
    )
    walk_share: float = setting(
        0.0,
        "Share of a sequence's blocks that start where the accepted drafts of its other blocks "
        "end, as decoding does; the other blocks start at random positions.",
        panel="Data",
        ge=0,
        lt=1,
    )
    validation_sequences: int = setting(
        96,
        "Samples held out for validation, over all sources; greedy ones where a source has them.",
        panel="Data",
        ge=1,
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
    epochs: float | None = setting(
        None,
        f"Passes over the data. [default: {DEFAULT_EPOCHS:g}, or what --minutes or --tokens allow]",
        panel="Optimizer",
        gt=0,
    )
    precision: Literal["bfloat16", "float32"] = setting(
        "bfloat16",
        "Precision of the drafter's file, of kept states, and of matrix products except on "
        "processors that only emulate it; master weights are float32.",
        panel="Optimizer",
    )

    minutes: float | None = setting(
        None,
        "Training time in minutes, validations included: chooses steps, batch, anchors and layers "
        "from a few timed steps, unless they are given.",
        panel="Budget",
        gt=0,
    )
    tokens: int | None = setting(
        None,
        "Answer tokens to train on, repetitions included; instead of --minutes or --epochs.",
        panel="Budget",
        ge=1,
    )

    micro_tokens: int | None = setting(
        None,
        "Maximum tokens per forward pass; lower it if memory is short. [default: 2560 on CPUs, "
        "16384 on GPUs]",
        panel="Run",
        ge=1,
    )
    recompute: bool = setting(
        False,
        "Compute draft layers again in the backward pass instead of keeping their activations: "
        "less memory, more time.",
        panel="Run",
    )
    attention: Literal["auto", "dense", "flex"] = setting(
        "auto",
        "Attention of the draft layers: plain tensor operations, or compiled flex attention, "
        "which needs CUDA (auto: flex on CUDA).",
        panel="Run",
    )
    packing: bool | None = setting(
        None,
        "Join the sequences of a pass into one row instead of padding them. [default: with flex "
        "attention, unless --compile]",
        panel="Run",
    )
    states: Literal["auto", "compute", "disk", "served"] = setting(
        "auto",
        "Target hidden states: computed in every step, or once and kept on disk (auto: with "
        "more than one epoch), or by a vLLM server that is started for it (served).",
        panel="Run",
    )
    states_from: tuple[str, ...] = setting(
        (),
        "URL of a server of `leadout serve --states` that computes the states; repeatable.",
        panel="Run",
        metavar="URL",
    )
    validate_every: int = setting(100, "Steps between validations.", panel="Run", ge=1)
    save_every: int = setting(50, "Steps between checkpoints.", panel="Run", ge=1)
    patience: int | None = setting(
        None, "Stop early after this many validations without improvement.", panel="Run", ge=1
    )
    compile: bool = setting(
        False, "Compile the drafter; pads every sequence to --max-length.", panel="Run"
    )
    sharded: bool = setting(
        False,
        "With several processes, shard weights, gradients and optimizer state over them (FSDP2).",
        panel="Run",
    )
    seed: int = setting(0, "Seed of anchors, sample order and initial weights.", panel="Run")

    @property
    def passes(self) -> float:
        """Passes over the data."""
        return DEFAULT_EPOCHS if self.epochs is None else self.epochs

    @model_validator(mode="after")
    def _require_shorter_first_blocks(self) -> Self:
        if self.first_block_size is not None and self.first_block_size >= self.block_size:
            raise ValueError(
                f"--first-block-size {self.first_block_size} must be below --block-size "
                f"{self.block_size}; omit it for blocks of one size."
            )
        return self

    @model_validator(mode="after")
    def _require_one_budget(self) -> Self:
        if self.minutes is not None and self.tokens is not None:
            raise ValueError("--minutes and --tokens are two budgets; give one of them.")
        return self
