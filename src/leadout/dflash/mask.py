"""Attention masks of blocks while decoding, from absolute positions.

One decode step of a batch has one block per row. Keys come in the order the drafter expects them:
the row's committed context, padded to the longest row, then the block itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leadout.dflash.config import LayerAttention


def decode_masks(
    layers: Sequence[LayerAttention],
    block_positions: Tensor,
    context_positions: Tensor,
    context_valid: Tensor,
) -> list[Tensor | None]:
    """One mask per layer for blocks at [batch, queries] after contexts at [batch, context].

    `context_valid` [batch, context] is false at padding; the block's own slots are always valid.
    """
    key_positions = torch.cat([context_positions, block_positions], dim=1)
    key_valid = torch.cat(
        [context_valid, torch.ones_like(block_positions, dtype=torch.bool)], dim=1
    )
    by_kind = {
        layer: decode_mask(layer, block_positions, key_positions, key_valid)
        for layer in set(layers)
    }
    return [by_kind[layer] for layer in layers]


def decode_mask(
    layer: LayerAttention,
    query_positions: Tensor,
    key_positions: Tensor,
    key_valid: Tensor | None = None,
) -> Tensor | None:
    """Boolean [batch, 1, queries, keys], true where a query may attend; None if everywhere.

    `query_positions` is [batch, queries], `key_positions` and `key_valid` are [batch, keys].
    """
    behind = query_positions[:, :, None] - key_positions[:, None, :]  # [batch, queries, keys]
    visible = torch.ones_like(behind, dtype=torch.bool)
    if key_valid is not None:
        visible &= key_valid[:, None, :]
    if layer.causal:
        visible &= behind >= 0
    if layer.window is not None:
        visible &= behind.abs() < layer.window
    return None if bool(visible.all()) else visible[:, None]
