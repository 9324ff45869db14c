"""The mask of flex attention and the dense mask agree with the definition, in packed rows too."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from leadout.dflash.config import DrafterConfig, LayerAttention
from leadout.dflash.drafter import KeyValue
from leadout.dflash.target import Target
from leadout.evaluate.block_attention import (
    Layout,
    attend_in_blocks,
    attend_with_flex,
    block_masks,
    flex_masks,
    mask_function,
)
from leadout.evaluate.blocks import (
    BlockForward,
    TrainingSequence,
    batch,
    drafted_slots,
    make_blocks,
    make_packed_blocks,
    pack,
    pack_states,
)
from leadout.evaluate.hidden_states import ComputedStates
from support.drafters import random_drafter


class RandomLayout(NamedTuple):
    layout: Layout
    layer: LayerAttention
    documents: Tensor  # [rows, length] of the tokens; -1 in padding
    positions: Tensor  # [rows, length] within the documents


def random_layout(seed: int) -> RandomLayout:
    draw = random.Random(seed)
    rows, length = draw.randint(1, 3), draw.randint(4, 40)
    blocks, block_size = draw.randint(1, 6), draw.randint(2, 8)
    documents = torch.full((rows, length), -1)
    positions = torch.zeros(rows, length, dtype=torch.int64)
    anchors, starts = torch.zeros(2, rows, blocks, dtype=torch.int64)
    for row in range(rows):
        used = draw.randint(2, length)
        edges = sorted({0, used, *(draw.randrange(used) for _ in range(draw.randint(0, 3)))})
        for number, (first, end) in enumerate(pairwise(edges)):
            documents[row, first:end] = number
            positions[row, first:end] = torch.arange(end - first)
        for block in range(draw.randint(1, blocks)):  # the others are padding
            anchor = draw.randrange(used)
            anchors[row, block] = anchor
            starts[row, block] = max(edge for edge in edges if edge <= anchor)
    layer = LayerAttention(draw.choice([None, 1, 3, 7, 64]), draw.random() < 0.5)
    return RandomLayout(Layout(anchors, starts, block_size, length), layer, documents, positions)


def mask_by_definition(given: RandomLayout) -> Tensor:
    """[rows, 1, blocks * B, length + blocks * B], from documents and positions of all keys."""
    (anchors, _, block_size, _), layer = given.layout, given.layer
    rows, blocks = anchors.shape
    slots = torch.arange(block_size)
    anchor_positions = given.positions.gather(1, anchors)  # [rows, blocks]
    of_slot = (anchor_positions[:, :, None] + slots).flatten(1)  # [rows, slots]
    block_of_slot = torch.arange(blocks).repeat_interleave(block_size).expand(rows, -1)
    document_of_slot = given.documents.gather(1, anchors).repeat_interleave(block_size, 1)
    key_positions = torch.cat([given.positions, of_slot], dim=1)
    key_documents = torch.cat([given.documents, document_of_slot], dim=1)
    key_blocks = torch.cat([torch.full_like(given.documents, -1), block_of_slot], dim=1)
    committed = (
        key_positions[:, None] < anchor_positions.repeat_interleave(block_size, 1)[..., None]
    )
    in_context = (key_blocks[:, None] == -1) & committed
    in_context &= key_documents[:, None] == document_of_slot[..., None]
    behind = of_slot[..., None] - key_positions[:, None]
    in_block = key_blocks[:, None] == block_of_slot[..., None]
    if layer.causal:
        in_block &= behind >= 0
    visible = in_context | in_block
    if layer.window is not None:
        visible &= behind.abs() < layer.window
    return visible[:, None]


def over_all_slots(mask: Tensor, layout: Layout) -> Tensor:
    """A mask [rows, 1, slots, length + B] over the keys of all blocks, not only the own one."""
    blocks = layout.anchors.shape[1]
    own = mask[..., layout.length :].unflatten(2, (blocks, layout.block_size))
    wide = torch.zeros(*own.shape[:4], blocks, layout.block_size, dtype=torch.bool)
    for block in range(blocks):
        wide[:, :, block, :, block] = own[:, :, block]
    return torch.cat([mask[..., : layout.length], wide.flatten(4).flatten(2, 3)], dim=-1)


def test_mask_function_and_dense_mask_agree_over_random_layouts(nightly: bool) -> None:
    several_documents = windows = 0
    count = 1000 if nightly else 150
    for seed in range(count):
        given = random_layout(seed)
        layout, layer = given.layout, given.layer
        expected = mask_by_definition(given)
        rows, _, queries, keys = expected.shape
        found = create_mask(mask_function(layer, layout), rows, 1, queries, keys, device="cpu")
        assert torch.equal(found, expected), f"layout {seed}"
        (dense,) = block_masks([layer], layout)
        assert dense is not None
        assert torch.equal(over_all_slots(dense, layout), expected), f"layout {seed}"
        assert expected.any(-1).all()  # a query that sees nothing would be NaN
        several_documents += bool(layout.starts.any())
        windows += layer.window is not None
    assert several_documents > 0.3 * count
    assert windows > 0.3 * count


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", [2, 6], ids=["no grouped heads", "grouped heads"])
def test_flex_attention_equals_the_reference(seed: int, heads: int) -> None:
    torch.manual_seed(seed)
    given = random_layout(seed)
    rows, blocks = given.layout.anchors.shape
    count = blocks * given.layout.block_size

    def some(of: int, length: int) -> Tensor:
        return torch.randn(rows, of, length, 16)

    queries = some(heads, count)
    context, own = (KeyValue(some(2, n), some(2, n)) for n in (given.layout.length, count))
    (dense,) = block_masks([given.layer], given.layout)
    (flex,) = flex_masks([given.layer], given.layout)
    expected = attend_in_blocks(queries, context, own, dense)
    found = attend_with_flex(queries, context, own, flex)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def some_sequences() -> tuple[list[TrainingSequence], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sequences = [
        TrainingSequence(str(n), "s", torch.randint(250, (length,), generator=generator), prompt)
        for n, (length, prompt) in enumerate([(31, 4), (9, 3), (19, 0)])  # the last: only an answer
    ]
    return sequences, [torch.tensor([4, 5, 11, 29]), torch.tensor([3, 7]), torch.tensor([0, 14])]


@torch.no_grad()
@pytest.mark.parametrize("flex", [False, True], ids=["dense", "flex"])
@pytest.mark.parametrize("window", [None, 5])
def test_packed_slots_equal_padded_ones(
    target: Target, drafter_config: DrafterConfig, window: int | None, flex: bool
) -> None:
    layers = (LayerAttention(window, causal=window is not None), LayerAttention())
    drafter = random_drafter(replace(drafter_config, layers=layers))
    size = drafter.config.block_size
    sequences, anchors = some_sequences()
    observed = ComputedStates(lambda: target).observe(list(enumerate(sequences)))
    tokens, _, supervised = batch(sequences)
    blocks = make_blocks(anchors, tokens, supervised, size, 4)
    forward = BlockForward(drafter, target.embedding)
    expected = drafted_slots(forward, *observed, tokens, blocks)
    row = pack(sequences)
    packed = make_packed_blocks(anchors, row, size)
    states, final = (pack_states(each, sequences) for each in observed)
    forward = BlockForward(drafter, target.embedding, flex=flex)
    found = drafted_slots(forward, states, final, row.tokens, packed, row.positions)
    assert torch.equal(found.counted, expected.counted)
    kept = expected.counted
    assert torch.equal(found.labels[kept], expected.labels[kept])
    torch.testing.assert_close(
        found.teacher[found.teacher_at[kept]], expected.teacher[expected.teacher_at[kept]]
    )
    torch.testing.assert_close(found.hidden, expected.hidden, atol=1e-5, rtol=1e-4)


def test_no_slot_counts_in_the_next_sequence() -> None:
    sequences, _ = some_sequences()
    row = pack(sequences)
    # The third sequence has no prompt, so the token after the second one's end is an answer's.
    none = torch.tensor([], dtype=torch.int64)
    blocks = make_packed_blocks([none, torch.tensor([7]), none], row, 5)
    assert blocks.counted.tolist() == [[[True, False, False, False]]]
