"""Samples as training sequences: tokens of prompt and answer, and which of them are the answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leadout.dflash.config import LayerAttention
from leadout.dflash.drafter import Drafter, KeyValue
from leadout.shards import Sample, Samples


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One answer with what came before it, cut to the longest length."""

    name: str
    source: str
    tokens: Tensor  # [length]
    prompt_length: int

    def __len__(self) -> int:
        return len(self.tokens)


class SequenceBatch(NamedTuple):
    tokens: Tensor  # [rows, longest], 0 in the padding
    lengths: Tensor  # [rows]
    supervised: Tensor  # [rows, longest]: the answer's tokens


def to_sequence(sample: Sample, max_length: int) -> TrainingSequence:
    tokens = torch.tensor((sample.prompt + sample.response)[:max_length])
    return TrainingSequence(sample.id, sample.source, tokens, min(len(sample.prompt), max_length))


def batch(sequences: Sequence[TrainingSequence]) -> SequenceBatch:
    longest = max(len(sequence) for sequence in sequences)
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
    supervised = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence.tokens
        supervised[row, sequence.prompt_length : len(sequence)] = True
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return SequenceBatch(tokens, lengths, supervised)


class Split(NamedTuple):
    """Indices into the samples."""

    train: list[int]
    validation: list[int]


def split(samples: Samples, max_length: int, held_out: int) -> Split:
    """Hold out greedy answers, drawn by name, the same number of each source as far as it goes.

    Only a greedy answer is what the target would say again, so only there an accepted draft is
    known. All answers to a held-out prompt are held out, also where it occurs again under another
    name. Answers of one token teach nothing.
    """
    by_source: dict[str, list[tuple[str, int]]] = {}
    prompt_of: list[str] = []
    text_of: list[bytes] = []
    usable: list[bool] = []
    for index in range(len(samples)):
        sample = samples[index]
        prompt = sample.id.rpartition("#")[0] or sample.id
        prompt_of.append(prompt)
        text_of.append(hashlib.sha256(repr(sample.prompt).encode()).digest())
        usable.append(len(sample.response) > 1 and len(sample.prompt) + 2 <= max_length)
        if sample.temperature == 0 and usable[-1]:
            rank = hashlib.sha256(f"held out {prompt}".encode()).hexdigest()
            by_source.setdefault(sample.source, []).append((rank, index))
    validation: list[int] = []
    queues = [sorted(found, reverse=True) for _, found in sorted(by_source.items())]
    # At least four of five samples stay for training.
    wanted = min(held_out, sum(usable) // 5)
    while len(validation) < wanted and any(queues):
        for queue in queues:
            if queue and len(validation) < wanted:
                validation.append(queue.pop()[1])
    hidden = {prompt_of[index] for index in validation}
    hidden_texts = {text_of[index] for index in validation}
    train = [
        index
        for index in range(len(samples))
        if usable[index] and prompt_of[index] not in hidden and text_of[index] not in hidden_texts
    ]
    return Split(train, sorted(validation))


# Which positions of a sequence become anchors in a step, and what their blocks must predict.
#
# Anchors are drawn anew at every step. The draw depends on nothing but the seed, the step and the
# sample, so it is the same on any number of ranks and after any interruption.


class Blocks(NamedTuple):
    """Blocks on a batch of sequences; those with no supervised slot are there to fill the shape."""

    anchors: Tensor  # [rows, blocks] positions, ascending; 0 where there is none
    labels: Tensor  # [rows, blocks, B-1] token ids at the slots' own positions
    counted: Tensor  # [rows, blocks, B-1] which of them are supervised


def candidates(prompt_length: int, length: int) -> Tensor:
    """Positions of a sequence that can be anchors: answered, and with an answer token after them.

    At serving, the first anchor is the first token of the answer.
    """
    return torch.arange(prompt_length, max(prompt_length, length - 1))


def draw_anchors(
    prompt_length: int, length: int, count: int, seed: int, step: int, name: str
) -> Tensor:
    """At most `count` anchors of one sequence without repetition, ascending."""
    possible = candidates(prompt_length, length)
    generator = torch.Generator().manual_seed(_seed_of(seed, step, name))
    chosen = torch.randperm(len(possible), generator=generator)[:count]
    return possible[chosen.sort().values]


def make_blocks(
    anchors: list[Tensor], tokens: Tensor, supervised: Tensor, block_size: int, blocks: int
) -> Blocks:
    """Pad each row's anchors to `blocks` and look up what their slots must predict.

    `tokens` and `supervised` are [rows, length]. A slot counts while all slots before it do: past
    the answer's end, or past a token that is no answer, nothing is known.
    """
    rows, length = tokens.shape
    padded = torch.zeros(rows, blocks, dtype=torch.int64)
    kept = torch.zeros(rows, blocks, dtype=torch.bool)
    for row, chosen in enumerate(anchors):
        padded[row, : len(chosen)] = chosen
        kept[row, : len(chosen)] = True
    slots = padded[:, :, None] + torch.arange(1, block_size)  # [rows, blocks, B-1]
    inside = slots < length
    places = slots.clamp(max=length - 1).flatten(1)
    labels = tokens.gather(1, places).view_as(slots)
    known = supervised.gather(1, places).view_as(slots) & inside & kept[:, :, None]
    return Blocks(padded, labels, known.long().cumprod(dim=-1).bool())


def _seed_of(seed: int, step: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {step} {name}".encode()).digest()
    return int.from_bytes(digest[:7])


# Attention of many blocks on one row, without the keys of other blocks.
#
# With N blocks of B slots on a context of S tokens, the plain way scores every slot against S + N*B
# keys and masks most of them. Here each slot is scored against the context and its own block: S + B
# keys. The result is the same.
#
# Keys a slot may see are the context strictly before its anchor (at serving, the anchor has no
# target
# state yet) and the slots of its own block.


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


# The drafter on many blocks at once: the same computation as at serving, many anchors a row.


class BlockForward(nn.Module):
    """A drafter and the frozen embedding it borrows; one module, so that it compiles as one."""

    def __init__(self, drafter: Drafter, embedding: Tensor) -> None:
        super().__init__()
        self.drafter = drafter
        self._embedding = embedding  # [vocab, H], the target's own

    def forward(self, states: Tensor, anchors: Tensor, anchor_tokens: Tensor) -> Tensor:
        """Hidden states of the slots after the anchors, [rows, blocks, B-1, H].

        `states` is [rows, length, taps * H], `anchors` and `anchor_tokens` are [rows, blocks].
        """
        config = self.drafter.config
        rows, length, _ = states.shape
        blocks = anchors.shape[1]
        places = torch.arange(length, device=states.device).expand(rows, -1)
        context = self.drafter.context_kv(self.drafter.context_features(states), places)
        slots = torch.arange(config.block_size, device=states.device)
        positions = (anchors[:, :, None] + slots).flatten(1)  # [rows, blocks * B]
        tokens = self.drafter.block_tokens(anchor_tokens.flatten(), config.block_size)
        hidden: Tensor = self.drafter(
            self.drafter.embed(tokens.view(rows, -1), self._embedding),
            positions,
            context,
            block_masks(config.layers, anchors, config.block_size, length),
            attend_in_blocks,
        )
        return hidden.view(rows, blocks, config.block_size, -1)[:, :, 1:]


class DraftedSlots(NamedTuple):
    """The supervised blocks of a batch, flat."""

    hidden: Tensor  # [blocks, B-1, H]
    labels: Tensor  # [blocks, B-1]
    counted: Tensor  # [blocks, B-1]
    teacher: Tensor  # [blocks, B-1, H]: what the target's head read to choose each label


def drafted_slots(
    forward: Callable[..., Tensor], states: Tensor, final: Tensor, tokens: Tensor, blocks: Blocks
) -> DraftedSlots:
    """Run the drafter and drop the blocks that only fill the shape."""
    device = states.device
    anchors = blocks.anchors.to(device)
    anchor_tokens = tokens.gather(1, blocks.anchors).to(device)
    hidden = forward(states, anchors, anchor_tokens)
    kept = blocks.counted.any(-1).to(device)  # [rows, blocks]
    slots = blocks.labels.shape[-1]
    # The label at p + k was chosen from the target's state at p + k - 1.
    places = (anchors[:, :, None] + torch.arange(slots, device=device)).flatten(1)
    places = places.clamp(max=final.shape[1] - 1)
    teacher = final.gather(1, places[:, :, None].expand(-1, -1, final.shape[2]))
    return DraftedSlots(
        hidden[kept],
        blocks.labels.to(device)[kept],
        blocks.counted.to(device)[kept],
        teacher.view(*anchors.shape, slots, -1)[kept],
    )
