"""A drafter with a cause undone, written as a checkpoint of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from leadout.check.hypotheses import Variant
from leadout.check.request import CheckError
from leadout.checkpoints import Checkpoint, load_weights, read_checkpoint, write_checkpoint
from leadout.checkpoints.store import refuse_existing


class NotFixableError(CheckError):
    """A cause that no edit of the drafter's files can undo."""


def write_fixed(
    drafter: Path, variant: Variant, out: Path, target_layers: int | None = None
) -> Checkpoint:
    """The checkpoint in `drafter` with the variant's edit, in the same format, in a new folder.

    `target_layers` completes a file that does not tell them. The record of its training is not
    copied: it describes another drafter.
    """
    if variant.normed_last_tap:
        raise NotFixableError(
            f"--fix: found the cause {variant.cause} ({variant.edit}), wanted one that a field or "
            "a tensor of the drafter decides: no format can say this; train the drafter on the "
            "states that vLLM hands over"
        )
    refuse_existing(out)
    checkpoint = read_checkpoint(drafter)
    weights = load_weights(checkpoint)
    if variant.weights is not None:
        weights = variant.weights(weights)
    config = variant.config
    if config.target_num_layers is None:
        config = replace(config, target_num_layers=target_layers)
    write_checkpoint(
        out,
        weights,
        config,
        checkpoint.format,
        target_name=checkpoint.target_name,
        draft_tokens=checkpoint.draft_tokens,
        kept=checkpoint.kept,
    )
    return read_checkpoint(out)
