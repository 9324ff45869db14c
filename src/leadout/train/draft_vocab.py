"""A drafter that chooses among the target's most frequent tokens only.

The output head is what drafting costs most where the vocabulary is large and the drafter small.
Rare tokens are then never drafted; the target still writes them, as its output never depends on
drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from leadout.checkpoints import Checkpoint, load_weights, read_checkpoint, write_checkpoint
from leadout.checkpoints.tensors import DRAFT_TO_TARGET
from leadout.evaluate.target_weights import HEAD, TargetFiles, load_target_weights
from leadout.train.config import TrainError


def reduce_draft_vocab(
    source: Path, destination: Path, target: Path, answers: Iterable[Sequence[int]], size: int
) -> tuple[Checkpoint, float]:
    """Write `source` with a head of `size` rows; returns it and the share of answers it covers.

    `answers` are token ids as the target writes them.
    """
    checkpoint = read_checkpoint(source)
    config = checkpoint.config
    if config.own_head:
        raise TrainError(
            f"{source}: found a drafter with a head of its own ({config.head_rows} rows), wanted "
            "one that borrows the target's; narrow the drafter that it was made from"
        )
    counts = token_counts(answers, config.vocab_size)
    seen = int((counts > 0).sum())
    if not 0 < size < config.vocab_size or size > seen:
        raise TrainError(
            f"--draft-vocab: found {size}, wanted 1 to {min(seen, config.vocab_size - 1)}: the "
            f"answers use {seen} of {config.vocab_size} tokens; give more of them, or draft fewer"
        )
    rows = counts.topk(size).indices.sort().values  # [size], target ids
    weights = load_weights(checkpoint)
    head = load_target_weights(
        TargetFiles(target), weights["fc.weight"].dtype, torch.device("cpu")
    ).head
    weights[HEAD] = head[rows].contiguous()
    weights[DRAFT_TO_TARGET] = rows - torch.arange(size)
    write_checkpoint(
        destination,
        weights,
        dataclasses.replace(config, own_head=True, draft_vocab_size=size),
        "speculators",  # the only published format that knows a draft vocabulary
        target_name=str(target),
        draft_tokens=checkpoint.draft_tokens,
    )
    return read_checkpoint(destination), float(counts[rows].sum() / counts.sum())


def token_counts(answers: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """How often each token occurs, [vocab]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for answer in answers:
        counts += torch.bincount(torch.tensor(answer), minlength=vocab_size)
    return counts
