"""Samples as training sequences: tokens of prompt and answer, and which of them are the answer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

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
