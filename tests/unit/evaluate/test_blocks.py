"""Held-out splits, anchors and labels; attention and drafts equal those of serving."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from leadout.dflash.config import DrafterConfig, LayerAttention
from leadout.dflash.drafter import KeyValue, attend_to_all
from leadout.dflash.propose import BlockProposer
from leadout.dflash.target import Target
from leadout.evaluate.block_attention import Layout, attend_in_blocks, block_masks
from leadout.evaluate.blocks import (
    BlockForward,
    Split,
    TrainingSequence,
    anchors_after,
    batch,
    drafted_slots,
    draw_anchors,
    make_blocks,
    possible_anchors,
    split,
    to_sequence,
)
from leadout.evaluate.hidden_states import ComputedStates
from leadout.shards import Sample, SampleFacts
from support.drafters import random_drafter

ROWS, LENGTH, BLOCK, WIDTH = 2, 23, 4, 8
ANCHORS = torch.tensor([[3, 4, 17, 22], [1, 9, 10, 0]])  # the last of the second row is padding
LAYOUT = Layout(ANCHORS, torch.zeros_like(ANCHORS), BLOCK, LENGTH)
KINDS = (
    LayerAttention(),
    LayerAttention(causal=True),
    LayerAttention(window=6, causal=True),
    LayerAttention(window=3),
)
LAYERS = {
    "bidirectional": (LayerAttention(), LayerAttention()),
    "causal": (LayerAttention(causal=True), LayerAttention()),
    "sliding": (LayerAttention(window=7, causal=True), LayerAttention(window=3), LayerAttention()),
}


def sample(
    name: str,
    prompt: list[int],
    temperature: float = 0.0,
    answer: int = 9,
) -> Sample:
    source = name.partition("/")[0]
    return Sample(
        id=name, source=source, prompt=prompt, response=[7] * answer, temperature=temperature
    )


def split_of(samples: list[Sample], held_out: int = 4, max_length: int = 64) -> Split:
    return split([SampleFacts.of(sample) for sample in samples], max_length, held_out)


def test_greedy_answers_are_held_out_equally_from_each_source() -> None:
    samples = [
        sample(f"{source}/{n}#0/0", [n, count], temperature=0.0 if n % 2 else 0.7)
        for source, count in (("code", 40), ("math", 20), ("chat", 6))
        for n in range(count)
    ]
    parts = split_of(samples, held_out=9)
    held_out = [samples[index] for index in parts.validation]
    assert all(each.temperature == 0 for each in held_out)
    assert Counter(each.source for each in held_out) == {"code": 3, "math": 3, "chat": 3}
    assert sorted(parts.train + parts.validation) == list(range(len(samples)))


def test_sources_without_greedy_answers_hold_out_sampled_ones() -> None:
    samples = [
        sample(f"{source}/{n}#0/0", [n, place], temperature=temperature if n else 0.7)
        for place, (source, temperature) in enumerate((("plain", 0.0), ("reasoning", 0.6)))
        for n in range(20)
    ]
    held_out = [samples[index] for index in split_of(samples, held_out=6).validation]
    temperatures = {each.source: each.temperature for each in held_out}
    assert temperatures["plain"] == 0.0
    assert temperatures["reasoning"] > 0
    assert Counter(each.source for each in held_out) == {"plain": 3, "reasoning": 3}


def test_no_prompt_is_in_both_training_and_validation() -> None:
    samples = [
        sample(f"asked/{n}#{again}/{turn}", [n] * (turn + 1), temperature=0.7 * again)
        for n in range(20)
        for again in range(2)
        for turn in range(2)
    ]
    parts = split_of(samples, held_out=6)
    prompts = {samples[index].id.partition("#")[0] for index in parts.validation}
    assert not prompts & {samples[index].id.partition("#")[0] for index in parts.train}
    assert len(parts.train) == len(samples) - 4 * len(prompts)


def test_the_same_prompt_under_another_name_is_held_out_too() -> None:
    samples = [sample(f"a/{n}#0/0", [n // 2]) for n in range(40)]  # every prompt twice
    parts = split_of(samples)
    texts = {tuple(samples[index].prompt) for index in parts.validation}
    assert len(parts.validation) == 4
    assert not texts & {tuple(samples[index].prompt) for index in parts.train}


def test_the_split_does_not_depend_on_the_order_of_samples() -> None:
    samples = [sample(f"a/{n}#0/0", [n]) for n in range(40)]
    chosen = {samples[index].id for index in split_of(samples).validation}
    reversed_samples = samples[::-1]
    assert {reversed_samples[index].id for index in split_of(reversed_samples).validation} == chosen


def test_at_most_a_fifth_of_the_samples_is_held_out() -> None:
    parts = split_of([sample(f"a/{n}#0/0", [n]) for n in range(20)], held_out=96)
    assert len(parts.validation) == 4


def test_unusable_answers_are_left_out() -> None:
    samples = [sample(f"a/{n}#0/0", [n]) for n in range(10)]
    samples.append(sample("a/short#0/0", [1], answer=1))
    samples.append(sample("a/long#0/0", [1] * 63))
    parts = split_of(samples)
    assert {10, 11}.isdisjoint([*parts.train, *parts.validation])


def test_a_sequence_is_cut_to_the_maximum_length() -> None:
    cut = to_sequence(sample("a/0#0/0", [1, 2, 3], answer=9), 8)
    assert cut.tokens.tolist() == [1, 2, 3, 7, 7, 7, 7, 7]
    assert cut.prompt_length == 3


def sequence(prompt: int, answer: int, name: str = "a") -> TrainingSequence:
    return TrainingSequence(name, "s", torch.arange(prompt + answer) + 100, prompt)


def test_anchors_depend_on_seed_step_and_sample_alone() -> None:
    def draw(seed: int = 0, step: int = 0, name: str = "a") -> list[int]:
        return draw_anchors(10, 200, 8, seed, step, name).tolist()

    torch.manual_seed(1)
    first = draw()
    torch.manual_seed(2)  # the global generator is somewhere else after an interruption
    assert draw() == first
    others = [draw(seed=1), draw(step=1), draw(name="b")]
    assert all(other != first for other in others)
    assert len({tuple(draw(step=step)) for step in range(50)}) == 50


def test_anchors_are_ascending_distinct_and_eventually_cover_every_position() -> None:
    seen = set()
    for step in range(200):
        drawn = draw_anchors(5, 20, 4, 0, step, "a").tolist()
        assert drawn == sorted(set(drawn))
        assert len(drawn) == 4
        seen |= set(drawn)
    # From the first answer token to the last but one: something has to follow.
    assert seen == set(range(5, 19))


def test_a_short_answer_has_fewer_anchors() -> None:
    assert draw_anchors(5, 8, 16, 0, 0, "a").tolist() == [5, 6]
    assert draw_anchors(5, 6, 16, 0, 0, "a").tolist() == []
    assert possible_anchors(5, 2).tolist() == []


def test_slots_count_up_to_the_end_of_the_answer() -> None:
    tokens, _, supervised = batch([sequence(2, 6), sequence(3, 2)])
    blocks = make_blocks([torch.tensor([2, 5]), torch.tensor([3])], tokens, supervised, 4, 3)
    assert blocks.anchors.tolist() == [[2, 5, 0], [3, 0, 0]]
    assert blocks.labels[0, 0].tolist() == [103, 104, 105]  # the token at each slot's own position
    assert blocks.counted[0].tolist() == [
        [True, True, True],
        [True, True, False],  # positions 6, 7, and 8 beyond the end
        [False, False, False],
    ]
    # The second row ends at position 4; the padding after it is no answer.
    assert blocks.counted[1, 0].tolist() == [True, False, False]
    assert not blocks.counted[1, 1:].any()


def test_no_slot_counts_after_a_token_outside_the_answer() -> None:
    tokens = torch.arange(10)[None]
    supervised = torch.ones(1, 10, dtype=torch.bool)
    supervised[0, 4] = False
    blocks = make_blocks([torch.tensor([2])], tokens, supervised, 6, 1)
    assert blocks.counted[0, 0].tolist() == [True, False, False, False, False]


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


@pytest.mark.parametrize("heads", [2, 6], ids=["no grouped heads", "grouped heads"])
@pytest.mark.parametrize("layer", KINDS, ids=str)
def test_block_attention_equals_dense_attention(layer: LayerAttention, heads: int) -> None:
    torch.manual_seed(0)
    count = ANCHORS.shape[1] * BLOCK

    def some(of: int, length: int) -> Tensor:
        return torch.randn(ROWS, of, length, WIDTH, requires_grad=True)

    queries = some(heads, count)
    context, own = (KeyValue(some(2, n), some(2, n)) for n in (LENGTH, count))
    (mask,) = block_masks([layer], LAYOUT)
    inputs = [queries, *context, *own]
    upstream = torch.randn(ROWS, heads, count, WIDTH)
    found = attend_in_blocks(queries, context, own, mask)
    expected = attend_to_all(queries, context, own, dense_mask(layer))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        atol=1e-5,
        rtol=1e-4,
    )


@pytest.mark.parametrize("layer", KINDS, ids=str)
def test_masks_match_their_definition(layer: LayerAttention) -> None:
    (mask,) = block_masks([layer], LAYOUT)
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
    masks = block_masks([KINDS[0], KINDS[1], KINDS[0]], LAYOUT)
    assert masks[0] is masks[2]
    assert masks[0] is not masks[1]


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_drafts_equal_those_of_the_decoding_loop(
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
        expected = []
        for sequence, chosen in zip(sequences, anchors, strict=True):
            states = target.states(sequence.tokens[None])
            for anchor in chosen.tolist():
                proposer = BlockProposer(drafter, target, 1)
                proposer.commit(states[:, :anchor], torch.tensor([anchor]))
                expected.append(proposer.block_logits(sequence.tokens[anchor][None], size - 1)[0])
    assert len(found) == len(expected) == 6
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-4, rtol=1e-4)
    assert torch.equal(found.argmax(-1), torch.stack(expected).argmax(-1))


def test_the_teacher_of_a_slot_is_the_state_that_chose_its_token(
    target: Target, drafter_config: DrafterConfig
) -> None:
    tokens = torch.randint(250, (1, 20), generator=torch.Generator().manual_seed(0))
    states, final = target.observe(tokens)
    blocks = make_blocks([torch.tensor([6])], tokens, torch.ones_like(tokens).bool(), 5, 1)
    forward = BlockForward(random_drafter(drafter_config), target.embedding)
    drafted = drafted_slots(forward, states, final, tokens, blocks)
    logits = target.step(tokens).logits  # at p, the target's view of p + 1
    torch.testing.assert_close(target.head(drafted.teacher[drafted.teacher_at])[0], logits[0, 6:10])
    assert drafted.labels[0].tolist() == tokens[0, 7:11].tolist()


def test_anchors_follow_where_decoding_goes_on() -> None:
    anchors, accepted = torch.tensor([10, 14, 20, 30]), torch.tensor([0, 1, 3, 7])
    none = torch.zeros(0, dtype=torch.int64)
    # 11, 16, 24 and 38: past the accepted drafts and the target's own token.
    assert anchors_after(anchors, accepted, none, 60, 9).tolist() == [11, 16, 24, 38]
    # The last token of a sequence is no anchor.
    assert anchors_after(anchors, accepted, none, 39, 9).tolist() == [11, 16, 24]
    assert anchors_after(anchors, accepted, none, 40, 9).tolist() == [11, 16, 24, 38]
    # Ends that meet, or that have a block already, are taken once.
    meeting = torch.tensor([5, 6, 7]), torch.tensor([4, 3, 0])
    assert anchors_after(*meeting, none, 60, 9).tolist() == [8, 10]
    leading = torch.tensor([5, 6]), torch.tensor([0, 2])
    assert anchors_after(*leading, none, 60, 9).tolist() == [9]


def test_a_random_draw_fills_up_the_anchors_that_follow() -> None:
    anchors, accepted = torch.tensor([10, 20]), torch.tensor([1, 1])
    others = torch.tensor([10, 12, 20, 31, 40, 55])
    found = anchors_after(anchors, accepted, others, 60, 4).tolist()
    assert found[:2] == [12, 22]
    assert len(found) == 4
    assert set(found[2:]) < {31, 40, 55}
    assert anchors_after(anchors, accepted, others, 60, 9).tolist() == [12, 22, 31, 40, 55]
    many = torch.arange(0, 100, 10)
    few = anchors_after(many, torch.zeros_like(many), others, 200, 2).tolist()
    assert few == [1, 51]  # of all parts of the text


def test_shorter_blocks_are_drafted_as_by_a_drafter_of_that_size(
    target: Target, drafter_config: DrafterConfig
) -> None:
    tokens = torch.randint(250, (1, 24), generator=torch.Generator().manual_seed(0))
    states, final = target.observe(tokens)
    known = torch.ones_like(tokens).bool()
    drafter = random_drafter(drafter_config)
    size = drafter_config.block_size - 2
    blocks = make_blocks([torch.tensor([6, 9])], tokens, known, size, 2)
    found = drafted_slots(BlockForward(drafter, target.embedding), states, final, tokens, blocks)
    smaller = random_drafter(replace(drafter_config, block_size=size))
    smaller.load_state_dict(drafter.state_dict())
    expected = BlockForward(smaller, target.embedding)(
        states, torch.tensor([[6, 9]]), tokens[:, [6, 9]]
    )
    assert found.hidden.shape == (2, size - 1, drafter_config.hidden_size)
    torch.testing.assert_close(found.hidden, expected[0])
