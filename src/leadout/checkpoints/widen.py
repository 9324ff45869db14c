"""A drafter with wider heads that drafts the same, for engines without a kernel for its own.

The added dimensions are zero in queries, keys and values. Rotary embeddings rotate dimension j
together with dimension j + size / 2, at a frequency that depends on j / size. With heads f times as
wide, pair j becomes pair f * j, which has the same frequency. Norms divide by a mean over more
dimensions, which makes queries and keys larger by the root of f each, while attention divides their
product by one root of f more; the weight of the keys' norm makes up for the difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from leadout.checkpoints.checkpoint import (
    Checkpoint,
    Format,
    load_weights,
    read_checkpoint,
    write_checkpoint,
)
from leadout.dflash.config import DrafterConfig, Yarn
from leadout.errors import LeadoutError

_ROWS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
_BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias")


class HeadDimError(LeadoutError):
    """The drafter cannot have heads of the requested size."""


def widen_heads(
    source: Path, destination: Path, to: Format, head_dim: int, target_name: str | None = None
) -> Checkpoint:
    """Write `source` with heads of `head_dim` dimensions.

    The same drafter but for rounding: the weights of the keys' norms are divided by a root, and
    the epsilon of head norms counts more by the same factor as heads are wider.
    """
    checkpoint = read_checkpoint(source)
    config = checkpoint.config
    _require_possible(source, config, head_dim)
    write_checkpoint(
        destination,
        widened(load_weights(checkpoint), config.head_dim, head_dim),
        dataclasses.replace(config, head_dim=head_dim),
        to,
        target_name=target_name or checkpoint.target_name,
        draft_tokens=checkpoint.draft_tokens,
        kept=checkpoint.kept,
    )
    return read_checkpoint(destination)


def widened(weights: Mapping[str, Tensor], before: int, after: int) -> dict[str, Tensor]:
    """The weights of a drafter whose heads grow from `before` to `after` dimensions."""
    factor = after // before
    half = torch.arange(before // 2)
    places = torch.cat([factor * half, after // 2 + factor * half])  # [before] in the new head
    found = dict(weights)
    for name, weight in weights.items():
        if name.endswith(_ROWS + _BIASES):
            # [heads, before] or [heads, before, H]
            heads = weight.reshape(-1, before, *weight.shape[1:])
            wide = weight.new_zeros(heads.shape[0], after, *heads.shape[2:])
            wide[:, places] = heads
            found[name] = wide.flatten(0, 1)
        elif name.endswith("o_proj.weight"):
            heads = weight.reshape(len(weight), -1, before)  # [H, heads, before]
            wide = weight.new_zeros(*heads.shape[:2], after)
            wide[:, :, places] = heads
            found[name] = wide.flatten(1)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            scale = factor**-0.5 if name.endswith("k_norm.weight") else 1.0
            found[name] = weight.new_zeros(after)
            found[name][places] = (weight.float() * scale).to(weight.dtype)
    return found


def _require_possible(source: Path, config: DrafterConfig, head_dim: int) -> None:
    problem = None
    if head_dim <= config.head_dim or head_dim % config.head_dim:
        problem = f"it must be a multiple of the drafter's {config.head_dim}, and larger"
    elif isinstance(config.rope.scaling, Yarn):
        problem = "frequencies of YaRN depend on the number of pairs, so drafts would change"
    elif config.rope.fraction != 1.0:
        problem = "only a part of each head is rotated, so pairs would change their frequency"
    if problem is not None:
        raise HeadDimError(f"--head-dim {head_dim} is not possible for {source}: {problem}.")
