"""Draft blocks on recorded answers: sequences, anchors, and the drafter run on many blocks at once.

A block of B slots starts at an anchor, a position of the answer whose token is known; its other
slots predict the B - 1 tokens after it. Training and evaluation run many blocks of a sequence in
one pass, with the same result as decoding each of them separately.
"""

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
    """A prompt with its answer, cut to the maximum length."""

    name: str
    source: str
    tokens: Tensor  # [length]
    prompt_length: int

    def __len__(self) -> int:
        return len(self.tokens)


class SequenceBatch(NamedTuple):
    tokens: Tensor  # [rows, longest], 0 in the padding
    lengths: Tensor  # [rows]
    supervised: Tensor  # [rows, longest]: True for the answer's tokens


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
    """Hold out greedy answers for validation, equally many of each source as far as possible.

    Which ones depends on a hash of their names alone. Only a greedy answer is what the target
    would write again, so only on those is it known which drafts it accepts. All answers to a
    held-out prompt are left out of training, also where the same prompt has another name. Answers
    of one token are not used.
    """
    by_source: dict[str, list[tuple[str, int]]] = {}
    usable: dict[int, tuple[str, bytes]] = {}  # with the name and a hash of the prompt
    for index in range(len(samples)):
        sample = samples[index]
        if len(sample.response) < 2 or len(sample.prompt) + 2 > max_length:
            continue
        prompt = sample.id.rpartition("#")[0] or sample.id
        usable[index] = (prompt, hashlib.sha256(repr(sample.prompt).encode()).digest())
        if sample.temperature == 0:
            rank = hashlib.sha256(f"held out {prompt}".encode()).hexdigest()
            by_source.setdefault(sample.source, []).append((rank, index))
    validation: list[int] = []
    queues = [sorted(found, reverse=True) for _, found in sorted(by_source.items())]
    count = min(held_out, len(usable) // 5)  # at least four of five stay for training
    while len(validation) < count and any(queues):
        for queue in queues:
            if queue and len(validation) < count:
                validation.append(queue.pop()[1])
    names, texts = {usable[i][0] for i in validation}, {usable[i][1] for i in validation}
    train = [i for i, (name, text) in usable.items() if name not in names and text not in texts]
    return Split(train, sorted(validation))


class Blocks(NamedTuple):
    """Blocks on a batch of sequences; blocks without a supervised slot are padding."""

    anchors: Tensor  # [rows, blocks] positions, ascending; 0 in padding
    labels: Tensor  # [rows, blocks, B-1] token ids at the slots' own positions
    counted: Tensor  # [rows, blocks, B-1] True for supervised slots


def possible_anchors(prompt_length: int, length: int) -> Tensor:
    """Positions of the answer that are followed by another answer token.

    As in serving, the first anchor is the first token of the answer.
    """
    return torch.arange(prompt_length, max(prompt_length, length - 1))


def draw_anchors(
    prompt_length: int, length: int, count: int, seed: int, step: int, name: str
) -> Tensor:
    """At most `count` distinct anchors of one sequence, ascending.

    The draw depends on the seed, the step and the sample's name alone, so it is the same on any
    number of ranks and after an interruption.
    """
    possible = possible_anchors(prompt_length, length)
    digest = hashlib.sha256(f"{seed} {step} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    chosen = torch.randperm(len(possible), generator=generator)[:count]
    return possible[chosen.sort().values]


def make_blocks(
    anchors: list[Tensor], tokens: Tensor, supervised: Tensor, block_size: int, blocks: int
) -> Blocks:
    """Pad each row's anchors to `blocks` and look up the labels of their slots.

    `tokens` and `supervised` are [rows, length]. A slot counts only if all slots before it do:
    past the end of the answer, or past a token that is not part of it, nothing is known.
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


def block_masks(
    layers: Sequence[LayerAttention], anchors: Tensor, block_size: int, length: int
) -> list[Tensor | None]:
    """One mask per layer, boolean [rows, 1, blocks * B, length + B]: context, then own block.

    A slot sees the context strictly before its anchor (in serving, the anchor has no target state
    yet) and the slots of its own block. `anchors` is [rows, blocks]; `length` is that of the
    context, padding included: no anchor lies in the padding, so no slot sees it.
    """
    by_kind = {layer: _mask(layer, anchors, block_size, length) for layer in set(layers)}
    return [by_kind[layer] for layer in layers]


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


class BlockForward(nn.Module):
    """A drafter with the target's frozen embedding, as one module that compiles as a whole."""

    def __init__(self, drafter: Drafter, embedding: Tensor) -> None:
        super().__init__()
        self.drafter = drafter
        self._embedding = embedding  # [vocab, H]

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
    """The supervised blocks of a batch, flattened."""

    hidden: Tensor  # [blocks, B-1, H]
    labels: Tensor  # [blocks, B-1]
    counted: Tensor  # [blocks, B-1]
    teacher: Tensor  # [blocks, B-1, H]: the target's final state from which it chose each label


def drafted_slots(
    forward: Callable[..., Tensor], states: Tensor, final: Tensor, tokens: Tensor, blocks: Blocks
) -> DraftedSlots:
    """Run the drafter and drop the padding blocks."""
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
