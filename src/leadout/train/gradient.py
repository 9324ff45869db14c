"""The gradient of one training step: sequences in passes of bounded size, blocks drawn on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from leadout.dflash.config import LogitScaling
from leadout.dflash.target import Observation
from leadout.evaluate.blocks import (
    DraftedSlots,
    TrainingSequence,
    anchors_after,
    batch,
    drafted_slots,
    draw_anchors,
    make_blocks,
    make_packed_blocks,
    pack,
    pack_states,
)
from leadout.evaluate.hidden_states import Indexed, ReadableStates, StateSource
from leadout.evaluate.target_weights import TargetWeights
from leadout.train.config import TrainConfig
from leadout.train.loader import PassInput
from leadout.train.objective import Head, Slots, loss_of_slots
from leadout.train.state import MasterWeights

# Rare tokens added to the candidates, drawn again in every step so that none is forgotten.
RANDOM_CANDIDATES = 1024
# Tokens of a pass. On CPUs the activations of a pass should stay near the cache.
MICRO_TOKENS = {"cpu": 2560, "cuda": 16384}
# Limits of the blocks of one sequence with --anchors-per-token.
MIN_ANCHORS, MAX_ANCHORS = 8, 512


def anchors_of(answer: int, config: TrainConfig) -> int:
    """Blocks to draw on a sequence whose answer has this many tokens; it may have fewer places."""
    if config.anchors_per_token is None:
        return config.anchors
    return min(max(round(config.anchors_per_token * answer), MIN_ANCHORS), MAX_ANCHORS)


def blocks_per_sequence(answers: Sequence[int], config: TrainConfig) -> float:
    """The mean of `anchors_of` over all training answers: known before any step."""
    return sum(anchors_of(answer, config) for answer in answers) / max(len(answers), 1)


def block_size_at(step: int, steps: int, config: TrainConfig) -> int:
    """The tokens of a block in one of the steps 0 to steps - 1."""
    if config.first_block_size is None or step >= config.first_block_share * steps:
        return config.block_size
    return config.first_block_size


def uses_flex(config: TrainConfig, device: torch.device) -> bool:
    return config.attention == "flex" or (config.attention == "auto" and device.type == "cuda")


def micro_tokens(config: TrainConfig, device: torch.device) -> int:
    return config.micro_tokens or MICRO_TOKENS.get(device.type, MICRO_TOKENS["cuda"])


class StepResult(NamedTuple):
    """Sums over the blocks of a step (of this rank)."""

    loss: float
    blocks: int
    hits: Tensor  # [B-1]: blocks whose slots up to this one are all right, a proxy of acceptance


class Gradient:
    """Gradients of the drafter's weights for one step, in passes of bounded size."""

    def __init__(
        self,
        forward: Callable[..., Tensor],
        weights: MasterWeights,
        target_weights: TargetWeights,
        source: StateSource,
        config: TrainConfig,
        frequent: Tensor | None,
        draft_scaling: LogitScaling | None = None,
        *,
        steps: int = 0,
        count_passes: Callable[[int], int] = int,
        spare: Callable[[], Indexed] | None = None,
    ) -> None:
        """`steps` are those of the run, the first of which may have shorter blocks.

        `count_passes` turns the passes of this rank into those that it must run. Ranks that share
        sharded weights run equally many; they fill up with the sequence `spare`.
        """
        self._forward = forward
        self._weights = weights
        self._head = target_weights.head
        self._scaling = target_weights.scaling
        self._draft_scaling = draft_scaling or LogitScaling()
        self._source = source
        self._config = config
        self._frequent = frequent  # [candidates] token ids, or None: score the whole vocabulary
        self._device = target_weights.embedding.device
        self._steps = steps
        self._count_passes = count_passes
        self._spare = spare
        flex = uses_flex(config, self._device)
        self._packing = flex and not config.compile if config.packing is None else config.packing

    def accumulate(self, sequences: Sequence[Indexed], step: int, denominator: float) -> StepResult:
        """Add the gradients of these sequences' part of a step to the master weights' own."""
        parts = self.passes(sequences)
        return self.add(map(self.prepare, parts), len(parts), step, denominator)

    def passes(self, sequences: Sequence[Indexed]) -> list[list[Indexed]]:
        return list(passes(sequences, self._config, self._device))

    def prepare(self, part: Sequence[Indexed]) -> PassInput:
        """Read what a pass needs, as far as it need not be computed; for the loader's thread."""
        readable = isinstance(self._source, ReadableStates) and self._source.can_read(part)
        return PassInput(part, self._source.observe(part) if readable else None)

    def add(
        self, inputs: Iterable[PassInput], count: int, step: int, denominator: float
    ) -> StepResult:
        """Add the gradients of `count` prepared passes to the master weights' own."""
        total, blocks = 0.0, 0
        hits = torch.zeros(self._config.block_size - 1)
        to_run = self._count_passes(count)
        for prepared in inputs:
            loss, leading = self._one_pass(prepared, step, denominator)
            total += loss
            blocks += len(leading)
            hits[: leading.shape[1]] += leading.float().sum(0).cpu()
        for _ in range(to_run - count):  # another rank has more: join it without a gradient
            assert self._spare is not None
            self._one_pass(self.prepare([self._spare()]), step, math.inf)
        return StepResult(total, blocks, hits)

    def _one_pass(self, prepared: PassInput, step: int, denominator: float) -> tuple[float, Tensor]:
        """The loss, and which slots [blocks, B-1] are right along with all slots before them."""
        sequences = [sequence for _, sequence in prepared.part]
        observed = self._on_device(prepared)
        anchors = self._anchors(sequences, step, 1 - self._config.walk_share)
        loss, leading = self._loss_at(anchors, sequences, observed, step, denominator)
        if self._config.walk_share > 0:
            after = self._anchors_after(anchors, leading, sequences, step)
            if any(map(len, after)):
                more, further = self._loss_at(after, sequences, observed, step, denominator)
                loss, leading = loss + more, torch.cat([leading, further])
        return loss, leading

    def _loss_at(
        self,
        anchors: list[Tensor],
        sequences: Sequence[TrainingSequence],
        observed: Observation,
        step: int,
        denominator: float,
    ) -> tuple[float, Tensor]:
        """The loss of blocks at the anchors of each sequence, whose gradients are added."""
        config, size = self._config, block_size_at(step, self._steps, self._config)
        slots_at = self._packed if self._packing else self._padded
        drafted = slots_at(anchors, sequences, observed, size)
        rows, labels = self._candidates(drafted.labels, step)
        teacher = drafted.teacher if config.distillation > 0 else None
        slots = Slots(labels, drafted.counted, teacher, drafted.teacher_at)
        head = Head(rows, self._scaling, self._draft_scaling)
        loss, hits = loss_of_slots(drafted.hidden, slots, head, config, denominator)
        loss.backward()  # type: ignore[no-untyped-call]
        self._weights.collect_gradients()
        return loss.item(), hits.long().cumprod(-1)

    def _padded(
        self,
        anchors: list[Tensor],
        sequences: Sequence[TrainingSequence],
        observed: Observation,
        block_size: int,
    ) -> DraftedSlots:
        """One row for each sequence."""
        config = self._config
        tokens, _, supervised = batch(sequences)
        count = max(len(drawn) for drawn in anchors)
        states, final = observed
        if config.compile:  # one shape for every pass: compiling takes minutes
            states = F.pad(states, (0, 0, 0, config.max_length - states.shape[1]))
            count = config.anchors if config.anchors_per_token is None else MAX_ANCHORS
            count = math.ceil(count * max(config.walk_share, 1 - config.walk_share))
        blocks = make_blocks(anchors, tokens, supervised, block_size, count)
        return drafted_slots(self._forward, states, final, tokens, blocks)

    def _packed(
        self,
        anchors: list[Tensor],
        sequences: Sequence[TrainingSequence],
        observed: Observation,
        block_size: int,
    ) -> DraftedSlots:
        """All sequences in one row."""
        row = pack(sequences)
        blocks = make_packed_blocks(anchors, row, block_size)
        states, final = (pack_states(each, sequences) for each in observed)
        return drafted_slots(self._forward, states, final, row.tokens, blocks, row.positions)

    def _on_device(self, prepared: PassInput) -> Observation:
        observed = prepared.observed or self._source.observe(prepared.part)
        # Pinned states are copied while the device still computes.
        states, final = (each.to(self._device, non_blocking=True) for each in observed)
        return Observation(states, final)

    def _anchors(
        self, sequences: Sequence[TrainingSequence], step: int, share: float = 1.0
    ) -> list[Tensor]:
        """A random draw for each sequence; a smaller share is a part of the same draw."""
        return [
            draw_anchors(
                sequence.prompt_length,
                len(sequence),
                max(1, round(share * self._blocks_on(sequence))),
                self._config.seed,
                step,
                sequence.name,
            )
            for sequence in sequences
        ]

    def _anchors_after(
        self,
        anchors: list[Tensor],
        leading: Tensor,
        sequences: Sequence[TrainingSequence],
        step: int,
    ) -> list[Tensor]:
        """The other anchors of each sequence, where its blocks at `anchors` end.

        `leading` [blocks, B-1] are the drafts of these blocks that decoding would accept.
        """
        accepted = torch.split(leading.sum(-1).cpu(), [len(drawn) for drawn in anchors])
        drawn = zip(anchors, accepted, self._anchors(sequences, step), sequences, strict=True)
        return [
            anchors_after(first, counts, every, len(each), self._blocks_on(each) - len(first))
            for first, counts, every, each in drawn
        ]

    def _blocks_on(self, sequence: TrainingSequence) -> int:
        return anchors_of(len(sequence) - sequence.prompt_length, self._config)

    def _candidates(self, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The rows of the head to score, and the labels' places among them.

        All rows, or those of the candidates and of this pass's labels.
        """
        if self._frequent is None:
            return self._head, labels
        generator = torch.Generator().manual_seed(step)
        rare = torch.randint(len(self._head), (RANDOM_CANDIDATES,), generator=generator)
        every = torch.cat([self._frequent, rare.to(self._head.device), labels.flatten()])
        rows = torch.unique(every)  # ascending
        return self._head[rows], torch.searchsorted(rows, labels)


def passes(
    sequences: Sequence[Indexed], config: TrainConfig, device: torch.device
) -> Iterator[list[Indexed]]:
    """Group sequences of similar length into passes of at most `micro_tokens` tokens."""
    limit = micro_tokens(config, device)
    part: list[Indexed] = []
    blocks = 0  # of the sequence of the part that has the most
    for item in sorted(sequences, key=lambda item: (len(item[1]), item[1].name)):
        sequence = item[1]  # no shorter than those before it
        own = anchors_of(len(sequence) - sequence.prompt_length, config)
        blocks = max(blocks, own)
        length = config.max_length if config.compile else len(sequence)
        if part and (len(part) + 1) * (length + blocks * config.block_size) > limit:
            yield part
            part, blocks = [], own
        part.append(item)
    if part:
        yield part
