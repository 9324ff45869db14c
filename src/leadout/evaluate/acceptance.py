"""Acceptance before anything is served: what the drafter would have got right, at every position.

On a greedy answer the target's choices are known, so for every anchor the drafts that would have
stood are known too. `along_decoding` then walks an answer as the engine would: from the first
token of the answer, each step jumps over the drafts that stood and the target's own token. That is
the acceptance length of serving; the plain mean over all positions is not, because decoding visits
the positions after a failed draft more often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from leadout.evaluate.blocks import (
    TrainingSequence,
    batch,
    drafted_slots,
    make_blocks,
    possible_anchors,
)
from leadout.evaluate.hidden_states import Indexed, StateSource
from leadout.evaluate.ranks import Ranks
from leadout.evaluate.target_weights import TargetWeights
from leadout.stats import Interval, ratio_interval

ANCHORS_PER_PASS = 64
CHUNK_SLOTS = 256


@dataclass(frozen=True, slots=True)
class AcceptedDrafts:
    """Of one answer: how many drafts stand at each position whose whole block is known."""

    source: str
    counts: Tensor  # [positions]


class Acceptance(BaseModel):
    """Acceptance over some answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    acceptance_length: float  # along decoding: what the engine will show
    by_position: list[float]  # share of decoding steps in which draft k stood
    steps: int
    every_position: float  # the mean over all positions
    positions: int


class Validation(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    overall: Acceptance
    by_source: dict[str, Acceptance]


def accepted_drafts_over_ranks(
    ranks: Ranks,
    sequences: Sequence[Indexed],
    judge: Callable[[Sequence[Indexed]], list[AcceptedDrafts]],
    block_size: int,
) -> list[AcceptedDrafts]:
    """As `accepted_drafts`, each rank a share of the answers, the whole on every rank."""
    positions = [len(_anchors(sequence, block_size)) for _, sequence in sequences]
    own = range(ranks.rank, len(sequences), ranks.count)
    found = dict(zip(own, judge([sequences[i] for i in own]), strict=True))
    parts = [
        found[i].counts if i in found else torch.zeros(count, dtype=torch.int64)
        for i, count in enumerate(positions)
    ]
    summed = torch.split(ranks.sum(torch.cat(parts)), positions)
    return [
        AcceptedDrafts(sequence.source, counts)
        for (_, sequence), counts in zip(sequences, summed, strict=True)
    ]


@torch.no_grad()
def accepted_drafts(
    forward: Callable[..., Tensor],
    borrowed: TargetWeights,
    source: StateSource,
    sequences: Sequence[Indexed],
    block_size: int,
    stride: int = 1,
) -> list[AcceptedDrafts]:
    """Draft at every position of every answer, one answer at a time.

    A larger stride leaves positions out: enough to compare two drafters, not to walk along.
    """
    found = []
    for item in sequences:
        observed = source.observe([item])
        device = borrowed.embedding.device
        states, final = observed.states.to(device), observed.final.to(device)
        sequence = item[1]
        tokens, _, supervised = batch([sequence])
        anchors = _anchors(sequence, block_size)[::stride]
        counts = []
        for part in torch.split(anchors, ANCHORS_PER_PASS) if len(anchors) else ():
            blocks = make_blocks([part], tokens, supervised, block_size, len(part))
            # Context after the last anchor is seen by no block.
            seen = int(part[-1]) + block_size
            drafted = drafted_slots(forward, states[:, :seen], final, tokens, blocks)
            counts.append(_leading_hits(drafted.hidden, drafted.labels, borrowed.head))
        joined = torch.cat(counts) if counts else torch.zeros(0, dtype=torch.int64)
        found.append(AcceptedDrafts(sequence.source, joined.cpu()))
    return found


def summarise(drafts: Sequence[AcceptedDrafts], block_size: int) -> Validation:
    sources = sorted({each.source for each in drafts})
    return Validation(
        overall=_acceptance(drafts, block_size),
        by_source={
            name: _acceptance([each for each in drafts if each.source == name], block_size)
            for name in sources
        },
    )


def along_decoding(counts: Tensor) -> list[int]:
    """The drafts that stand at each step, from the accepted counts of all positions in order."""
    steps, place = [], 0
    while place < len(counts):
        steps.append(int(counts[place]))
        place += steps[-1] + 1
    return steps


def _anchors(sequence: TrainingSequence, block_size: int) -> Tensor:
    """The anchors whose whole block lies in the answer."""
    return possible_anchors(sequence.prompt_length, len(sequence) - (block_size - 2))


def _acceptance(drafts: Sequence[AcceptedDrafts], block_size: int) -> Acceptance:
    steps = [count for each in drafts for count in along_decoding(each.counts)]
    every = torch.cat([each.counts for each in drafts]).float()
    taken = max(len(steps), 1)
    return Acceptance(
        acceptance_length=1 + sum(steps) / taken,
        by_position=[sum(c > k for c in steps) / taken for k in range(block_size - 1)],
        steps=len(steps),
        every_position=1 + (every.mean().item() if len(every) else 0.0),
        positions=len(every),
    )


def _leading_hits(hidden: Tensor, labels: Tensor, head: Tensor) -> Tensor:
    """How many leading drafts of each block [blocks, B-1] are the label."""
    flat = hidden.flatten(0, 1).to(head.dtype)
    guesses = torch.cat([(part @ head.T).argmax(-1) for part in torch.split(flat, CHUNK_SLOTS)])
    return (guesses.view_as(labels) == labels).long().cumprod(-1).sum(-1)


# Acceptance with its uncertainty: what the numbers of a few dozen prompts can say.
#
# One definition for both sides. A decoding step accepts the leading drafts that the target agrees
# with; acceptance length is tokens per step, the target's own included. Offline the steps are those
# of a walk along the target's text; served, they are vLLM's counters. Prompts, not tokens, are
# drawn
# again for the intervals: tokens of one text are not independent.


@dataclass(frozen=True, slots=True)
class TextAcceptance:
    """Of one text: drafts that stand at each position of its answer, and at each decoding step."""

    prompt_set: str
    prompt_length: int
    at_positions: Tensor  # [positions]
    at_steps: list[int]


class AcceptanceTable(BaseModel):
    """Acceptance length of some texts, as one number and taken apart."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    texts: int
    steps: int
    length: Interval
    by_position: list[Interval]


def tabulate(texts: Sequence[TextAcceptance], draft_tokens: int) -> AcceptanceTable:
    steps = np.array([len(text.at_steps) for text in texts], dtype=np.float64)
    reached = np.array(
        [
            [sum(count > place for count in text.at_steps) for place in range(draft_tokens)]
            for text in texts
        ],
        dtype=np.float64,
    )  # [texts, K]
    return AcceptanceTable(
        texts=len(texts),
        steps=int(steps.sum()),
        length=ratio_interval(reached.sum(1), steps).plus(1),
        by_position=[ratio_interval(reached[:, place], steps) for place in range(draft_tokens)],
    )


class Gain(BaseModel):
    """How much more one way of drafting accepts than another, on the same positions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    before: float  # accepted drafts and the target's token, mean over positions
    after: float
    difference: Interval

    @property
    def relative(self) -> float:
        return self.after / self.before - 1

    @property
    def is_significant(self) -> bool:
        return self.difference.low > 0


def paired_gain(before: Sequence[Tensor], after: Sequence[Tensor]) -> Gain:
    """Compare accepted drafts at the same positions of the same texts."""
    sizes = np.array([len(each) for each in before], dtype=np.float64)
    first = np.array([each.sum().item() for each in before], dtype=np.float64)
    second = np.array([each.sum().item() for each in after], dtype=np.float64)
    total = max(float(sizes.sum()), 1.0)
    return Gain(
        before=1 + float(first.sum()) / total,
        after=1 + float(second.sum()) / total,
        difference=ratio_interval(second - first, sizes),
    )
