"""The trainer computes what serving computes: the same drafts, and the same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from leadout.dflash.config import DrafterConfig, LayerAttention
from leadout.dflash.propose import BlockProposer
from leadout.dflash.target import Target
from leadout.evaluate.blocks import (
    BlockForward,
    TrainingSequence,
    batch,
    drafted_slots,
    make_blocks,
)
from leadout.evaluate.hidden_states import ComputedStates
from support.drafters import random_drafter

LAYERS = {
    "bidirectional": (LayerAttention(), LayerAttention()),
    "causal": (LayerAttention(causal=True), LayerAttention()),
    "sliding": (LayerAttention(window=7, causal=True), LayerAttention(window=3), LayerAttention()),
}


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_slots_are_those_of_the_decoding_loop(
    target: Target, drafter_config: DrafterConfig, layers: tuple[LayerAttention, ...]
) -> None:
    config = replace(drafter_config, layers=layers)
    drafter = random_drafter(config)
    size = config.block_size
    generator = torch.Generator().manual_seed(0)
    sequences = [
        TrainingSequence(str(n), "s", torch.randint(250, (length,), generator=generator), 4)
        for n, length in enumerate((31, 19))  # the second row is padded
    ]
    anchors = [torch.tensor([4, 5, 11, 26]), torch.tensor([4, 14])]
    tokens, _, supervised = batch(sequences)
    observed = ComputedStates(lambda: target).observe(list(enumerate(sequences)))
    blocks = make_blocks(anchors, tokens, supervised, size, 4)
    with torch.no_grad():
        drafted = drafted_slots(BlockForward(drafter, target.embedding), *observed, tokens, blocks)
        found = drafter.logits(drafted.hidden, target.head)  # [blocks, B-1, vocab]
        wanted = []
        for sequence, chosen in zip(sequences, anchors, strict=True):
            states = target.states(sequence.tokens[None])
            for anchor in chosen.tolist():
                proposer = BlockProposer(drafter, target, 1)
                proposer.commit(states[:, :anchor], torch.tensor([anchor]))
                wanted.append(proposer.block_logits(sequence.tokens[anchor][None], size - 1)[0])
    assert len(found) == len(wanted) == 6
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-4, rtol=1e-4)
    assert torch.equal(found.argmax(-1), torch.stack(wanted).argmax(-1))


def test_the_teacher_of_a_slot_is_the_state_that_chose_its_token(
    target: Target, drafter_config: DrafterConfig
) -> None:
    tokens = torch.randint(250, (1, 20), generator=torch.Generator().manual_seed(0))
    states, final = target.observe(tokens)
    blocks = make_blocks([torch.tensor([6])], tokens, torch.ones_like(tokens).bool(), 5, 1)
    forward = BlockForward(random_drafter(drafter_config), target.embedding)
    drafted = drafted_slots(forward, states, final, tokens, blocks)
    logits = target.step(tokens).logits  # at p, the target's view of p + 1
    torch.testing.assert_close(target.head(drafted.teacher)[0], logits[0, 6:10])
    assert drafted.labels[0].tolist() == tokens[0, 7:11].tolist()
