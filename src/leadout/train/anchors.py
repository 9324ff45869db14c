"""Which positions of a sequence become anchors in a step, and what their blocks must predict.

Anchors are drawn anew at every step. The draw depends on nothing but the seed, the step and the
sample, so it is the same on any number of ranks and after any interruption.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor


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
