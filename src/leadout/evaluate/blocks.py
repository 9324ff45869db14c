"""Draft blocks on recorded answers: sequences, anchors, and the drafter run on many blocks at once.

A block of B slots starts at an anchor, a position of the answer whose token is known; its other
slots predict the B - 1 tokens after it. Training and evaluation run many blocks of a sequence in
one pass, with the same result as decoding each of them separately. A row holds one sequence, or
several sequences that are packed one after the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leadout.dflash.drafter import Drafter
from leadout.evaluate.block_attention import (
    Layout,
    attend_in_blocks,
    attend_with_flex,
    block_masks,
    flex_masks,
)
from leadout.shards import Sample, SampleFacts


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


class PackedRow(NamedTuple):
    """Several sequences as one row, without padding."""

    tokens: Tensor  # [1, length]
    supervised: Tensor  # [1, length]: True for the answers' tokens
    documents: Tensor  # [1, length]: to which sequence each token belongs
    positions: Tensor  # [1, length] within the sequence
    starts: Tensor  # [sequences]: the place of each sequence's first token


def pack(sequences: Sequence[TrainingSequence]) -> PackedRow:
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    starts = lengths.cumsum(0) - lengths
    documents = torch.arange(len(sequences)).repeat_interleave(lengths)
    positions = torch.arange(int(lengths.sum())) - starts[documents]
    prompts = torch.tensor([sequence.prompt_length for sequence in sequences])
    return PackedRow(
        torch.cat([sequence.tokens for sequence in sequences])[None],
        (positions >= prompts[documents])[None],
        documents[None],
        positions[None],
        starts,
    )


def pack_states(padded: Tensor, sequences: Sequence[TrainingSequence]) -> Tensor:
    """States [sequences, longest, width] as one row [1, length, width] without the padding."""
    rows = zip(padded, sequences, strict=True)
    return torch.cat([states[: len(sequence)] for states, sequence in rows])[None]


class Split(NamedTuple):
    """Indices into the samples."""

    train: list[int]
    validation: list[int]


def split(samples: Sequence[SampleFacts], max_length: int, held_out: int) -> Split:
    """Hold out answers for validation, equally many of each source as far as possible.

    Which ones depends on a hash of their names alone. Of a source with greedy answers, those are
    held out: they have no noise of sampling. Of a source without, as data of reasoning models is,
    sampled ones are (see `acceptance` for why both give the acceptance of serving). All answers to
    a held-out prompt are left out of training, also where the same prompt has another name.
    Answers of one token are not used.
    """
    by_source: dict[str, dict[bool, list[tuple[str, int]]]] = {}
    usable: dict[int, tuple[str, bytes]] = {}  # with the name and a hash of the prompt
    for index, sample in enumerate(samples):
        if sample.response_length < 2 or sample.prompt_length + 2 > max_length:
            continue
        prompt = sample.id.rpartition("#")[0] or sample.id
        usable[index] = (prompt, sample.prompt_hash)
        rank = hashlib.sha256(f"held out {prompt}".encode()).hexdigest()
        kinds = by_source.setdefault(sample.source, {})
        kinds.setdefault(sample.temperature == 0, []).append((rank, index))
    validation: list[int] = []
    queues = [
        sorted(kinds.get(True) or kinds[False], reverse=True)
        for _, kinds in sorted(by_source.items())
    ]
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
    starts: Tensor  # [rows, blocks] the place where each block's sequence starts in the row


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


def anchors_after(
    anchors: Tensor, accepted: Tensor, others: Tensor, length: int, count: int
) -> Tensor:
    """At most `count` anchors where decoding goes on after blocks at `anchors` [blocks], ascending.

    Decoding moves past the accepted drafts [blocks] of a block and the target's own token. Anchors
    that have a block already are left out, and `others`, a random draw, fill up what is missing.
    """
    ends = torch.unique(anchors + accepted + 1)
    ends = _spread(ends[(ends < length - 1) & ~torch.isin(ends, anchors)], count)
    free = others[~torch.isin(others, torch.cat([anchors, ends]))]
    return torch.cat([ends, _spread(free, count - len(ends))]).sort().values


def _spread(values: Tensor, count: int) -> Tensor:
    """At most `count` of the values, from their whole range."""
    taken = min(count, len(values))
    return values[len(values) * torch.arange(taken) // max(taken, 1)]


def make_blocks(
    anchors: list[Tensor], tokens: Tensor, supervised: Tensor, block_size: int, blocks: int
) -> Blocks:
    """Pad each row's anchors to `blocks` and look up the labels of their slots.

    `tokens` and `supervised` are [rows, length]. A slot counts only if all slots before it do:
    past the end of the answer, or past a token that is not part of it, nothing is known.
    """
    rows, _ = tokens.shape
    padded = torch.zeros(rows, blocks, dtype=torch.int64)
    kept = torch.zeros(rows, blocks, dtype=torch.bool)
    for row, chosen in enumerate(anchors):
        padded[row, : len(chosen)] = chosen
        kept[row, : len(chosen)] = True
    documents = torch.zeros_like(tokens)
    starts = torch.zeros_like(padded)
    return _labelled(padded, kept, starts, tokens, supervised, documents, block_size)


def make_packed_blocks(anchors: list[Tensor], row: PackedRow, block_size: int) -> Blocks:
    """Blocks at the anchors of each sequence (positions within it) in a packed row."""
    counts = torch.tensor([len(chosen) for chosen in anchors])
    starts = row.starts.repeat_interleave(counts)[None]  # [1, blocks]
    places = torch.cat(anchors)[None] + starts
    kept = torch.ones_like(places, dtype=torch.bool)
    return _labelled(places, kept, starts, row.tokens, row.supervised, row.documents, block_size)


def _labelled(
    anchors: Tensor,
    kept: Tensor,
    starts: Tensor,
    tokens: Tensor,
    supervised: Tensor,
    documents: Tensor,
    block_size: int,
) -> Blocks:
    length = tokens.shape[1]
    slots = anchors[:, :, None] + torch.arange(1, block_size)  # [rows, blocks, B-1]
    places = slots.clamp(max=length - 1).flatten(1)
    labels = tokens.gather(1, places).view_as(slots)
    same = documents.gather(1, places).view_as(slots) == documents.gather(1, anchors)[:, :, None]
    known = supervised.gather(1, places).view_as(slots) & same
    known &= (slots < length) & kept[:, :, None]
    return Blocks(anchors, labels, known.long().cumprod(dim=-1).bool(), starts)


class BlockForward(nn.Module):
    """A drafter with the target's frozen embedding, as one module that compiles as a whole."""

    def __init__(self, drafter: Drafter, embedding: Tensor, *, flex: bool = False) -> None:
        """`flex` uses flex attention, for CUDA; it is compiled for the shapes it meets."""
        super().__init__()
        self.drafter = drafter
        self._embedding = embedding  # [vocab, H]
        self.flex = flex

    def forward(
        self,
        states: Tensor,
        anchors: Tensor,
        anchor_tokens: Tensor,
        starts: Tensor | None = None,
        places: Tensor | None = None,
        block_size: int | None = None,
    ) -> Tensor:
        """Hidden states of the slots after the anchors, [rows, blocks, B-1, H].

        `states` is [rows, length, taps * H], `anchors` and `anchor_tokens` are [rows, blocks]. In
        packed rows, `starts` [rows, blocks] is where the sequence of each block starts and `places`
        [rows, length] the position of each token within its sequence. B is that of the drafter
        unless `block_size` is given.
        """
        config = self.drafter.config
        size = block_size or config.block_size
        rows, length, _ = states.shape
        states = states.to(self._embedding.dtype)  # they may be kept in fewer bits
        blocks = anchors.shape[1]
        if starts is None:
            starts = torch.zeros_like(anchors)
        if places is None:
            places = torch.arange(length, device=states.device).expand(rows, -1)
        context = self.drafter.context_kv(self.drafter.context_features(states), places)
        slots = torch.arange(size, device=states.device)
        positions = ((anchors - starts)[:, :, None] + slots).flatten(1)  # [rows, blocks * B]
        tokens = self.drafter.block_tokens(anchor_tokens.flatten(), size)
        layout = Layout(anchors, starts, size, length)
        masks: Sequence[Any] = (
            flex_masks(config.layers, layout) if self.flex else block_masks(config.layers, layout)
        )
        hidden: Tensor = self.drafter(
            self.drafter.embed(tokens.view(rows, -1), self._embedding),
            positions,
            context,
            masks,
            attend_with_flex if self.flex else attend_in_blocks,
        )
        return hidden.view(rows, blocks, size, -1)[:, :, 1:]


class DraftedSlots(NamedTuple):
    """The supervised blocks of a batch, flattened."""

    hidden: Tensor  # [blocks, B-1, H]
    labels: Tensor  # [blocks, B-1]
    counted: Tensor  # [blocks, B-1]
    teacher: Tensor  # [rows * length, H]: the target's final states
    teacher_at: Tensor  # [blocks, B-1]: the state from which the target chose each label


def drafted_slots(
    forward: Callable[..., Tensor],
    states: Tensor,
    final: Tensor,
    tokens: Tensor,
    blocks: Blocks,
    positions: Tensor | None = None,
) -> DraftedSlots:
    """Run the drafter and drop the padding blocks; `positions` [rows, length] in packed rows."""
    device = states.device
    anchors = blocks.anchors.to(device)
    anchor_tokens = tokens.gather(1, blocks.anchors).to(device)
    packed = () if positions is None else (blocks.starts.to(device), positions.to(device))
    size = blocks.labels.shape[-1] + 1
    hidden = forward(states, anchors, anchor_tokens, *packed, block_size=size)
    kept = blocks.counted.any(-1).to(device)  # [rows, blocks]
    # The label at p + k was chosen from the target's state at p + k - 1.
    rows, length, _ = final.shape
    slots = torch.arange(blocks.labels.shape[-1], device=device)
    places = (anchors[:, :, None] + slots).clamp(max=length - 1)  # [rows, blocks, B-1]
    teacher_at = places + length * torch.arange(rows, device=device)[:, None, None]
    return DraftedSlots(
        hidden[kept],
        blocks.labels.to(device)[kept],
        blocks.counted.to(device)[kept],
        final.flatten(0, 1),
        teacher_at[kept],
    )
