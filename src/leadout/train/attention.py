"""Attention of many blocks on one row, without the keys of other blocks.

With N blocks of B slots on a context of S tokens, the plain way scores every slot against S + N*B
keys and masks most of them. Here each slot is scored against the context and its own block: S + B
keys. The result is the same.

Keys a slot may see are the context strictly before its anchor (at serving, the anchor has no target
state yet) and the slots of its own block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leadout.dflash.config import LayerAttention
from leadout.dflash.drafter import KeyValue


def block_masks(
    layers: Sequence[LayerAttention], anchors: Tensor, block_size: int, length: int
) -> list[Tensor | None]:
    """One mask per layer, boolean [rows, 1, blocks * B, length + B]: context, then own block.

    `anchors` is [rows, blocks]; `length` is that of the context, padding included: no anchor lies
    in the padding, so no slot sees it.
    """
    by_kind = {layer: _mask(layer, anchors, block_size, length) for layer in set(layers)}
    return [by_kind[layer] for layer in layers]


def attend_in_blocks(
    queries: Tensor, context: KeyValue, own: KeyValue, mask: Tensor | None
) -> Tensor:
    """Queries [rows, heads, blocks * B, head_dim] to the context and to their own blocks."""
    assert mask is not None
    rows, heads, count, width = queries.shape
    groups = own.keys.shape[1]
    length = context.keys.shape[2]
    block = mask.shape[-1] - length  # B
    # Query heads that share a key head are rows of one matrix product.
    grouped = (queries * width**-0.5).view(rows, groups, -1, width)
    to_context = grouped @ context.keys.transpose(2, 3)  # [rows, groups, n * queries, length]
    in_blocks = grouped.view(rows, groups, heads // groups, -1, block, width)
    own_keys = own.keys.view(rows, groups, 1, -1, block, width)
    to_own = in_blocks @ own_keys.transpose(-2, -1)  # [rows, groups, n, blocks, B, B]
    scores = torch.cat(
        [
            to_context.view(rows, heads, count, length),
            to_own.view(rows, heads, count, block),
        ],
        dim=-1,
    )
    shares = torch.softmax(scores.float().masked_fill(~mask, -torch.inf), dim=-1)
    shares = shares.to(queries.dtype)
    for_context, for_own = torch.split(shares, [length, block], dim=-1)
    for_context = for_context.reshape(rows, groups, -1, length)
    for_own = for_own.reshape(rows, groups, heads // groups, -1, block, block)
    own_values = own.values.view(rows, groups, 1, -1, block, width)
    attended = (for_context @ context.values).view(rows, heads, count, width)
    return attended + (for_own @ own_values).view(rows, heads, count, width)


def _mask(layer: LayerAttention, anchors: Tensor, block_size: int, length: int) -> Tensor:
    rows, blocks = anchors.shape
    slots = torch.arange(block_size, device=anchors.device)
    positions = torch.arange(length, device=anchors.device)
    sees_context = positions < anchors[:, :, None, None]  # [rows, blocks, 1, length]
    sees_context = sees_context.expand(-1, -1, block_size, -1)
    sees_own = torch.ones(block_size, block_size, dtype=torch.bool, device=anchors.device)
    if layer.causal:
        sees_own = slots[None, :] <= slots[:, None]
    if layer.window is not None:
        queries = anchors[:, :, None] + slots  # [rows, blocks, B]
        sees_context = sees_context & (queries[..., None] - positions < layer.window)
        sees_own = sees_own & ((slots[:, None] - slots[None, :]).abs() < layer.window)
    both = torch.cat([sees_context, sees_own.expand(rows, blocks, -1, -1)], dim=-1)
    return both.flatten(1, 2)[:, None]
