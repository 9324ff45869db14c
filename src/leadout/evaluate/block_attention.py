"""Attention of many blocks on one row of context, with the result of decoding each separately.

A row holds a sequence, or several one after the other (packed). The keys of a row are its context
and then the slots of all its blocks. A slot sees

- the context of its own sequence strictly before its anchor: in serving, the anchor has no target
  state yet;
- the slots of its own block, in a causal layer only those up to itself;

and in a layer with a window only keys at a distance below it. Two implementations compute the
same: `attend_in_blocks` in plain tensor operations on any device, and `attend_with_flex`, which
skips the hidden tiles on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from leadout.dflash.config import LayerAttention
from leadout.dflash.drafter import KeyValue

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Layout(NamedTuple):
    """Blocks on rows of context."""

    anchors: Tensor  # [rows, blocks] places in the row
    starts: Tensor  # [rows, blocks] the place where the sequence of each block starts
    block_size: int
    length: int  # of the context, padding included: no anchor lies in padding, so no slot sees it


def block_masks(layers: Sequence[LayerAttention], layout: Layout) -> list[Tensor | None]:
    """One mask per layer, boolean [rows, 1, blocks * B, length + B]: context, then own block."""
    by_kind = {layer: _mask(layer, layout) for layer in set(layers)}
    return [by_kind[layer] for layer in layers]


def _mask(layer: LayerAttention, layout: Layout) -> Tensor:
    anchors, starts, block_size, length = layout
    rows, blocks = anchors.shape
    slots = torch.arange(block_size, device=anchors.device)
    places = torch.arange(length, device=anchors.device)
    sees_context = places < anchors[:, :, None, None]  # [rows, blocks, 1, length]
    sees_context = sees_context & (places >= starts[:, :, None, None])
    sees_context = sees_context.expand(-1, -1, block_size, -1)
    sees_own = torch.ones(block_size, block_size, dtype=torch.bool, device=anchors.device)
    if layer.causal:
        sees_own = slots[None, :] <= slots[:, None]
    if layer.window is not None:
        queries = anchors[:, :, None] + slots  # [rows, blocks, B]
        sees_context = sees_context & (queries[..., None] - places < layer.window)
        sees_own = sees_own & ((slots[:, None] - slots[None, :]).abs() < layer.window)
    both = torch.cat([sees_context, sees_own.expand(rows, blocks, -1, -1)], dim=-1)
    return both.flatten(1, 2)[:, None]


def attend_in_blocks(
    queries: Tensor, context: KeyValue, own: KeyValue, mask: Tensor | None
) -> Tensor:
    """Attention of queries [rows, heads, blocks * B, head_dim] to context and own block.

    With N blocks on a context of S tokens, attention over one row would score every slot against
    S + N * B keys and mask most of them. This scores S + B keys per slot, with the same result.
    """
    assert mask is not None
    rows, heads, count, width = queries.shape
    groups = own.keys.shape[1]
    length = context.keys.shape[2]
    block = mask.shape[-1] - length  # B
    # Query heads that share a key head become rows of one matrix product.
    grouped = (queries * width**-0.5).view(rows, groups, -1, width)
    to_context = grouped @ context.keys.transpose(2, 3)  # [rows, groups, n * queries, length]
    in_blocks = grouped.view(rows, groups, heads // groups, -1, block, width)
    own_keys = own.keys.view(rows, groups, 1, -1, block, width)
    to_own = in_blocks @ own_keys.transpose(-2, -1)  # [rows, groups, n, blocks, B, B]
    parts = [to_context.view(rows, heads, count, length), to_own.view(rows, heads, count, block)]
    scores = torch.cat(parts, dim=-1)
    weights = torch.softmax(scores.float().masked_fill(~mask, -torch.inf), dim=-1)
    weights = weights.to(queries.dtype)
    on_context, on_own = torch.split(weights, [length, block], dim=-1)
    on_context = on_context.reshape(rows, groups, -1, length)
    on_own = on_own.reshape(rows, groups, heads // groups, -1, block, block)
    own_values = own.values.view(rows, groups, 1, -1, block, width)
    attended = (on_context @ context.values).view(rows, heads, count, width)
    return attended + (on_own @ own_values).view(rows, heads, count, width)


def mask_function(layer: LayerAttention, layout: Layout) -> MaskFunction:
    """The mask of one layer for flex attention: `mask_mod(row, head, query, key)`.

    Query indices count the slots of all blocks; key indices the context, then those slots.
    """
    anchors, starts, block_size, length = layout

    def may_attend(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        slot = query - block * block_size
        anchor = anchors[row, block]
        on_context = (key >= starts[row, block]) & (key < anchor)
        own_slot = key - length - block * block_size  # of this block if from 0 to B - 1
        on_own = (own_slot >= 0) & (own_slot < block_size)
        if layer.causal:
            on_own = on_own & (own_slot <= slot)
        if layer.window is not None:
            on_context = on_context & (anchor + slot - key < layer.window)
            on_own = on_own & ((slot - own_slot).abs() < layer.window)
        return torch.where(key < length, on_context, on_own)

    return may_attend


def flex_masks(layers: Sequence[LayerAttention], layout: Layout) -> list[BlockMask]:
    """One mask per layer for `attend_with_flex`."""
    rows, blocks = layout.anchors.shape
    queries, device = blocks * layout.block_size, layout.anchors.device
    create = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    by_kind = {
        layer: create(
            mask_function(layer, layout), rows, None, queries, layout.length + queries, device
        )
        for layer in set(layers)
    }
    return [by_kind[layer] for layer in layers]


def attend_with_flex(queries: Tensor, context: KeyValue, own: KeyValue, mask: BlockMask) -> Tensor:
    """As `attend_in_blocks`, with a mask of `flex_masks`.

    Off CUDA it is not compiled and scores all pairs: good for comparing results only.
    """
    attend = _compiled(flex_attention) if queries.is_cuda else flex_attention
    attended: Tensor = attend(
        queries,
        torch.cat([context.keys, own.keys], dim=2),
        torch.cat([context.values, own.values], dim=2),
        block_mask=mask,
        scale=queries.shape[-1] ** -0.5,
        enable_gqa=queries.shape[1] != own.keys.shape[1],
    )
    return attended


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)
