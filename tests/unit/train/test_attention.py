"""Blocks on one row see exactly what the mask's definition lets them see, and no more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leadout.dflash.config import LayerAttention
from leadout.dflash.drafter import KeyValue, attend_to_all
from leadout.evaluate.blocks import attend_in_blocks, block_masks

ROWS, LENGTH, BLOCK, WIDTH = 2, 23, 4, 8
ANCHORS = torch.tensor([[3, 4, 17, 22], [1, 9, 10, 0]])  # the last of the second row is a filler
KINDS = (
    LayerAttention(),
    LayerAttention(causal=True),
    LayerAttention(window=6, causal=True),
    LayerAttention(window=3),
)


def may_see(layer: LayerAttention, anchor: int, slot: int, key: int, own_block: bool) -> bool:
    """The definition, one pair at a time: `key` is a position, or a slot of a block."""
    if own_block:
        allowed = key <= slot if layer.causal else True
        return allowed and (layer.window is None or abs(slot - key) < layer.window)
    in_window = layer.window is None or anchor + slot - key < layer.window
    return key < anchor and in_window


def dense_mask(layer: LayerAttention) -> Tensor:
    """[rows, 1, blocks * B, context + blocks * B]"""
    blocks = ANCHORS.shape[1]
    mask = torch.zeros(ROWS, 1, blocks * BLOCK, LENGTH + blocks * BLOCK, dtype=torch.bool)
    for row in range(ROWS):
        for query in range(blocks * BLOCK):
            block, slot = divmod(query, BLOCK)
            anchor = int(ANCHORS[row, block])
            for key in range(LENGTH):
                mask[row, 0, query, key] = may_see(layer, anchor, slot, key, False)
            for key in range(BLOCK):
                place = LENGTH + block * BLOCK + key
                mask[row, 0, query, place] = may_see(layer, anchor, slot, key, True)
    return mask


@pytest.mark.parametrize("heads", [2, 6], ids=["one query head a key head", "three"])
@pytest.mark.parametrize("layer", KINDS, ids=str)
def test_the_same_as_a_dense_mask(layer: LayerAttention, heads: int) -> None:
    torch.manual_seed(0)
    count = ANCHORS.shape[1] * BLOCK

    def some(of: int, length: int) -> Tensor:
        return torch.randn(ROWS, of, length, WIDTH, requires_grad=True)

    queries = some(heads, count)
    context, own = (KeyValue(some(2, n), some(2, n)) for n in (LENGTH, count))
    (mask,) = block_masks([layer], ANCHORS, BLOCK, LENGTH)
    inputs = [queries, *context, *own]
    upstream = torch.randn(ROWS, heads, count, WIDTH)
    found = attend_in_blocks(queries, context, own, mask)
    wanted = attend_to_all(queries, context, own, dense_mask(layer))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(wanted, inputs, upstream),
        atol=1e-5,
        rtol=1e-4,
    )


@pytest.mark.parametrize("layer", KINDS, ids=str)
def test_the_mask_is_the_definition(layer: LayerAttention) -> None:
    (mask,) = block_masks([layer], ANCHORS, BLOCK, LENGTH)
    assert mask is not None
    dense = dense_mask(layer)
    blocks = torch.arange(ANCHORS.shape[1] * BLOCK) // BLOCK
    own = torch.stack(
        [
            dense[:, :, query, LENGTH + block * BLOCK : LENGTH + (block + 1) * BLOCK]
            for query, block in enumerate(blocks.tolist())
        ],
        dim=2,
    )
    assert torch.equal(mask, torch.cat([dense[..., :LENGTH], own], dim=-1))
    assert mask.any(-1).all()  # a query that sees nothing would be NaN


def test_layers_of_one_kind_share_a_mask() -> None:
    masks = block_masks([KINDS[0], KINDS[1], KINDS[0]], ANCHORS, BLOCK, LENGTH)
    assert masks[0] is masks[2]
    assert masks[0] is not masks[1]
