"""Offline acceptance: what drafters would get accepted along known texts, with its uncertainty.

A recorded token takes the place of what the target would choose. On a greedy answer that is exact.
On a sampled answer it is one draw: exact verification accepts a draft with the probability that
the target would have drawn it, and the recorded draw equals the draft with the same probability.
The mean over many requests is therefore that of serving in both cases.

`along_decoding` follows an answer as the engine does: from the first token of the answer, each step
moves past the accepted drafts and the target's own token. The mean over those steps is the
acceptance length of serving: tokens per step, the target's own included. The plain mean over all
positions differs, because decoding visits the positions after a rejected draft more often.

Confidence intervals resample texts, not tokens: the tokens of one text are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from leadout.checkpoints import load_drafter, read_checkpoint
from leadout.dflash.drafter import Drafter
from leadout.evaluate.blocks import (
    BlockForward,
    TrainingSequence,
    batch,
    drafted_slots,
    make_blocks,
    possible_anchors,
    to_sequence,
)
from leadout.evaluate.hidden_states import Indexed, SharedStates, StateSource, compute_dtype
from leadout.evaluate.ranks import Ranks
from leadout.evaluate.reference import reference_target, why_not_loaded
from leadout.evaluate.target_weights import (
    TargetFiles,
    TargetWeights,
    load_target_weights,
    slots_per_chunk,
)
from leadout.shards import Sample
from leadout.stats import Floats, Interval, paired_p_value, ratio_interval

ANCHORS_PER_PASS = 64
# Dense attention of a pass holds scores, in the model's type and in float32: fewer anchors in long
# texts keep them below this.
SCORE_BYTES, BYTES_PER_SCORE = 1 << 30, 12
HEADS = 64  # of large drafters
# Whose drafts are compared together, of several answers: a pass over the head takes about as long
# for a few states as for dozens.
BLOCKS_PER_COMPARISON = 512


@dataclass(frozen=True, slots=True)
class AcceptedDrafts:
    """Accepted drafts at each position of one answer whose whole block is known."""

    source: str
    counts: Tensor  # [positions]


class DraftHead(NamedTuple):
    """The output head that a drafter drafts with."""

    rows: Tensor  # [draft vocab, H]
    target_ids: Tensor | None = None  # [draft vocab]; None: row i is token i

    @classmethod
    def of(cls, drafter: Drafter, weights: TargetWeights) -> DraftHead:
        """The drafter's own head, or the target's."""
        if drafter.lm_head is None:
            return cls(weights.head)
        rows = drafter.lm_head.weight.detach()
        every = torch.arange(len(rows), device=rows.device)
        return cls(rows, None if drafter.d2t is None else drafter.to_target_ids(every))

    def drafts(self, hidden: Tensor) -> Tensor:
        """The token of the largest score for each state [states, H]; no scaling changes it."""
        parts = torch.split(hidden.to(self.rows.dtype), slots_per_chunk(self.rows))
        best = torch.cat([(part @ self.rows.T).argmax(-1) for part in parts])
        return best if self.target_ids is None else self.target_ids[best]


@torch.no_grad()
def accepted_drafts(
    forward: Callable[..., Tensor],
    head: DraftHead,
    source: StateSource,
    sequences: Sequence[Indexed],
    block_size: int,
    stride: int = 1,
) -> list[AcceptedDrafts]:
    """Draft at every position of every answer, one answer at a time.

    A larger stride skips positions: enough to compare two drafters, not for `along_decoding`.
    """
    comparison = _Comparison(head)
    positions = []
    for item in sequences:
        observed = source.observe([item])
        device = head.rows.device
        states, final = observed.states.to(device), observed.final.to(device)
        sequence = item[1]
        tokens, _, supervised = batch([sequence])
        anchors = _anchors(sequence, block_size)[::stride]
        positions.append(len(anchors))
        count = anchors_per_pass(block_size, len(sequence))
        for part in torch.split(anchors, count) if len(anchors) else ():
            blocks = make_blocks([part], tokens, supervised, block_size, len(part))
            # No block attends to context after the last anchor.
            length = int(part[-1]) + block_size
            drafted = drafted_slots(forward, states[:, :length], final, tokens, blocks)
            comparison.add(drafted.hidden, drafted.labels)
    return [
        AcceptedDrafts(sequence.source, counts)
        for (_, sequence), counts in zip(
            sequences, torch.split(comparison.counts(), positions), strict=True
        )
    ]


def anchors_per_pass(block_size: int, length: int) -> int:
    """As many as their scores [heads, anchors * B, length + B] allow."""
    of_one = HEADS * block_size * (length + block_size) * BYTES_PER_SCORE
    return max(1, min(ANCHORS_PER_PASS, SCORE_BYTES // of_one))


def accepted_drafts_over_ranks(
    ranks: Ranks,
    sequences: Sequence[Indexed],
    evaluate: Callable[[Sequence[Indexed]], list[AcceptedDrafts]],
    block_size: int,
) -> list[AcceptedDrafts]:
    """Split the answers among the ranks; every rank gets the results of all of them."""
    positions = [len(_anchors(sequence, block_size)) for _, sequence in sequences]
    own = range(ranks.rank, len(sequences), ranks.count)
    found = dict(zip(own, evaluate([sequences[i] for i in own]), strict=True))
    parts = [
        found[i].counts if i in found else torch.zeros(count, dtype=torch.int64)
        for i, count in enumerate(positions)
    ]
    summed = torch.split(ranks.sum(torch.cat(parts)), positions)
    return [
        AcceptedDrafts(sequence.source, counts)
        for (_, sequence), counts in zip(sequences, summed, strict=True)
    ]


def along_decoding(counts: Tensor) -> list[int]:
    """Accepted drafts at each decoding step, from the counts [positions] at every position."""
    steps, place = [], 0
    while place < len(counts):
        steps.append(int(counts[place]))
        place += steps[-1] + 1
    return steps


def _anchors(sequence: TrainingSequence, block_size: int) -> Tensor:
    """The anchors whose whole block lies in the answer."""
    return possible_anchors(sequence.prompt_length, len(sequence) - (block_size - 2))


class _Comparison:
    """Counts the accepted drafts of blocks; those of several answers are compared at once."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self._waiting: list[tuple[Tensor, Tensor]] = []  # hidden [blocks, B-1, H], labels
        self._counts: list[Tensor] = []  # of earlier blocks

    def add(self, hidden: Tensor, labels: Tensor) -> None:
        self._waiting.append((hidden, labels))
        if sum(len(each) for _, each in self._waiting) >= BLOCKS_PER_COMPARISON:
            self._compare()

    def counts(self) -> Tensor:
        """[blocks]: in the order in which they were added."""
        if self._waiting:
            self._compare()
        return torch.cat(self._counts) if self._counts else torch.zeros(0, dtype=torch.int64)

    def _compare(self) -> None:
        hidden, labels = (torch.cat(each) for each in zip(*self._waiting, strict=True))
        self._counts.append(_leading_matches(hidden, labels, self._head).cpu())
        self._waiting.clear()


def _leading_matches(hidden: Tensor, labels: Tensor, head: DraftHead) -> Tensor:
    """The number of leading drafts that equal the labels [blocks, B-1], for each block.

    Slot by slot, because only blocks that have matched so far need the next slot's scores, and the
    head is most of the cost if the vocabulary is large.
    """
    counts = torch.zeros(len(labels), dtype=torch.int64, device=labels.device)
    left = torch.arange(len(labels), device=labels.device)
    for slot in range(labels.shape[1]):
        if not len(left):
            break
        left = left[head.drafts(hidden[left, slot]) == labels[left, slot]]
        counts[left] += 1
    return counts


class Acceptance(BaseModel, extra="forbid", frozen=True):
    """Acceptance over some answers."""

    acceptance_length: float  # along decoding: what the engine will show
    by_position: list[float]  # share of decoding steps that accept draft k
    steps: int
    every_position: float  # the mean over all positions
    positions: int


class Validation(BaseModel, extra="forbid", frozen=True):
    """Acceptance over held-out answers, in total and by source."""

    overall: Acceptance
    by_source: dict[str, Acceptance]


def summarise(drafts: Sequence[AcceptedDrafts], block_size: int) -> Validation:
    sources = sorted({each.source for each in drafts})
    return Validation(
        overall=_acceptance(drafts, block_size),
        by_source={
            name: _acceptance([each for each in drafts if each.source == name], block_size)
            for name in sources
        },
    )


def _acceptance(drafts: Sequence[AcceptedDrafts], block_size: int) -> Acceptance:
    steps = [count for each in drafts for count in along_decoding(each.counts)]
    every = torch.cat([each.counts for each in drafts]).float()
    divisor = max(len(steps), 1)
    return Acceptance(
        acceptance_length=1 + sum(steps) / divisor,
        by_position=[sum(c > k for c in steps) / divisor for k in range(block_size - 1)],
        steps=len(steps),
        every_position=1 + (every.mean().item() if len(every) else 0.0),
        positions=len(every),
    )


@dataclass(frozen=True, slots=True)
class TextAcceptance:
    """Accepted drafts of one text, at each position of its answer and at each decoding step."""

    prompt_set: str
    prompt_length: int
    at_positions: Tensor  # [positions]
    at_steps: list[int]
    prompt: str = ""  # a hash of its token ids


def acceptance_by_drafter(
    target: Path,
    drafters: Sequence[Path],
    samples: Sequence[Sample],
    max_length: int,
    device: torch.device,
    report: Callable[[], None] = lambda: None,
    urls: Sequence[str] = (),
    vllm_flags: Sequence[str] = (),
    states: StateSource | None = None,
) -> list[list[TextAcceptance]]:
    """For each drafter, its acceptance on every sample; `report` is called after each sample.

    The target's states come from `states`, if all drafters read the same layers and these are
    known; else from servers of hidden states if there are `urls`, or from one that is started with
    `vllm_flags` if the target cannot be loaded on `device`.
    """
    precision = read_checkpoint(drafters[0]).tensors.dtype
    computed_in = compute_dtype(precision, device)
    served = False
    if states is None and not urls:
        served = why_not_loaded(target, computed_in, device, vllm_flags) is not None
    if served:
        device = torch.device("cpu")  # the server that is started takes the GPU
    weights = load_target_weights(TargetFiles(target), computed_in, device)
    forwards = [
        BlockForward(load_drafter(folder, computed_in).to(device), weights.embedding)
        for folder in drafters
    ]
    heads = [DraftHead.of(forward.drafter, weights) for forward in forwards]
    max_drafts = [served_draft_tokens(folder) for folder in drafters]
    found: list[list[TextAcceptance]] = [[] for _ in drafters]
    items = [(number, to_sequence(each, max_length)) for number, each in enumerate(samples)]
    taps = [forward.drafter.config.target_layer_ids for forward in forwards]
    with ExitStack() as opened:
        if states is not None:
            sources = [states for _ in forwards]
        else:
            layer_ids = {layer for each in taps for layer in each}
            reference = reference_target(
                target,
                layer_ids,
                precision if served or urls else computed_in,
                longest=max((len(sequence) for _, sequence in items), default=1),
                device=device,
                urls=urls,
                served=served,
                vllm_flags=vllm_flags,
            )
            shared = SharedStates(opened.enter_context(reference), layer_ids, keep_all=False)
            sources = [shared.tapped_at(each) for each in taps]
        for item, sample in zip(items, samples, strict=True):
            compared = zip(found, forwards, heads, sources, max_drafts, strict=True)
            for texts, forward, head, source, limit in compared:
                size = forward.drafter.config.block_size
                (drafts,) = accepted_drafts(forward, head, source, [item], size)
                counts = drafts.counts.clamp(max=limit)
                steps = along_decoding(counts)
                texts.append(TextAcceptance(sample.source, len(sample.prompt), counts, steps))
            report()
    return found


def served_draft_tokens(drafter: Path) -> int:
    """The K that `leadout serve` uses by default: that of the checkpoint, or the whole block."""
    checkpoint = read_checkpoint(drafter)
    return checkpoint.draft_tokens or checkpoint.config.max_draft_tokens


class AcceptanceTable(BaseModel, extra="forbid", frozen=True):
    """Acceptance length of some texts, in total and by draft position."""

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


def lengths_by_draft_tokens(texts: Sequence[TextAcceptance], draft_tokens: int) -> list[Interval]:
    """Acceptance length with 1, 2, ... `draft_tokens` drafts: each step keeps the first of them."""
    found = []
    for limit in range(1, draft_tokens + 1):
        steps = [along_decoding(text.at_positions.clamp(max=limit)) for text in texts]
        accepted = np.array([sum(each) for each in steps], dtype=np.float64)
        counts = np.array([len(each) for each in steps], dtype=np.float64)
        found.append(ratio_interval(accepted, counts).plus(1))
    return found


class Gain(BaseModel, extra="forbid", frozen=True):
    """The difference in acceptance between two drafters at the same positions."""

    before: float  # accepted drafts and the target's token, mean over positions
    after: float
    difference: Interval
    p_value: float  # two-sided, of this comparison alone

    @property
    def relative(self) -> float:
        return self.after / self.before - 1


def paired_gain(before: Sequence[Tensor], after: Sequence[Tensor]) -> Gain:
    """Compare accepted drafts [positions] of each text, at the same positions of the same texts."""
    return gain_of_sums(_sums(before), _sums(after), _lengths(before))


def gain_of_sums(before: Floats, after: Floats, positions: Floats) -> Gain:
    """The gain from the accepted drafts and the number of positions of each text, all [texts]."""
    total = max(float(positions.sum()), 1.0)
    return Gain(
        before=1 + float(before.sum()) / total,
        after=1 + float(after.sum()) / total,
        difference=ratio_interval(after - before, positions),
        p_value=paired_p_value(after - before, positions),
    )


def _sums(counts: Sequence[Tensor]) -> Floats:
    return np.array([each.sum().item() for each in counts], dtype=np.float64)


def _lengths(counts: Sequence[Tensor]) -> Floats:
    return np.array([len(each) for each in counts], dtype=np.float64)
