"""All that decides a training run: each field is a flag, a yaml key and a default at once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from leadout.settings import Settings


class TrainConfig(Settings):
    """A training run. None means: chosen from the target, the data and the machine, and written
    back, so that the resolved file repeats the run."""

    command = "train"

    # The drafter.
    layers: Annotated[int, Field(ge=1, description="Draft layers.")] = 5
    block_size: Annotated[int, Field(ge=2, description="B: the anchor and B-1 drafts.")] = 8
    target_layer_ids: Annotated[
        tuple[int, ...] | None, Field(description="Tapped target layers; unset: spread evenly.")
    ] = None
    mask_token_id: Annotated[
        int | None, Field(ge=0, description="Unset: a token that the data never uses.")
    ] = None
    initial: Annotated[
        str,
        Field(
            description="First weights: `random`, or the folder of a drafter of the same shape to "
            "go on from."
        ),
    ] = "random"

    # The objective.
    distillation: Annotated[
        float, Field(ge=0, le=1, description="Share of the target's distribution in the labels.")
    ] = 0.5
    position_weights: Annotated[
        Literal["dpace", "exponential"], Field(description="How later slots count.")
    ] = "dpace"
    gamma: Annotated[
        float, Field(gt=0, description="Slots until exponential weights fall to 1/e.")
    ] = 4.0
    dpace_alpha: Annotated[float, Field(ge=0, le=1, description="Floor of D-PACE's odds.")] = 0.5
    candidates: Annotated[
        int | None,
        Field(ge=1, description="Score against so many frequent tokens; unset: the vocabulary."),
    ] = None

    # The data.
    max_length: Annotated[int, Field(ge=8, description="Longest sequence; the rest is cut.")] = 2048
    anchors: Annotated[int, Field(ge=1, description="Blocks per sequence and step.")] = 64
    validation_sequences: Annotated[
        int, Field(ge=1, description="Greedy sequences held out, over all sources.")
    ] = 96

    # The optimiser.
    optimizer: Annotated[
        Literal["muon", "adamw"], Field(description="Muon for matrices, or AdamW for all.")
    ] = "muon"
    learning_rate: Annotated[float, Field(gt=0, description="At the peak.")] = 1e-3
    warmup: Annotated[float, Field(ge=0, lt=1, description="Share of steps until the peak.")] = 0.04
    weight_decay: Annotated[float, Field(ge=0, description="On matrices.")] = 0.01
    clip: Annotated[float, Field(gt=0, description="Largest gradient norm.")] = 1.0
    batch_sequences: Annotated[
        int, Field(ge=1, description="Sequences per step, over all ranks.")
    ] = 64
    epochs: Annotated[float, Field(gt=0, description="Passes over the data.")] = 6.0
    precision: Annotated[
        Literal["bfloat16", "float32"], Field(description="Of the matrix products.")
    ] = "bfloat16"
    micro_tokens: Annotated[
        int, Field(ge=1, description="Context and block tokens of one forward pass.")
    ] = 16384

    # The run.
    states: Annotated[
        Literal["auto", "compute", "disk"],
        Field(description="Target states at every step anew, or kept on disk."),
    ] = "auto"
    validate_every: Annotated[int, Field(ge=1, description="Steps between validations.")] = 100
    save_every: Annotated[int, Field(ge=1, description="Steps between checkpoints.")] = 50
    patience: Annotated[
        int | None, Field(ge=1, description="Validations without gain until it stops early.")
    ] = None
    compile: Annotated[
        bool, Field(description="Compile the drafter; every sequence is padded to --max-length.")
    ] = False
    seed: Annotated[int, Field(description="Of anchors, order and initial weights.")] = 0
