"""The gradient of one training step: sequences in passes of bounded size, summed over blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from leadout.train.anchors import Blocks, draw_anchors, make_blocks
from leadout.train.borrowed import Borrowed
from leadout.train.config import TrainConfig
from leadout.train.forward import drafted_slots
from leadout.train.loss import Objective, Scores, Slots, loss_of_slots
from leadout.train.sequences import batch
from leadout.train.states import Indexed, StateSource
from leadout.train.weights import TrainedWeights

RANDOM_CANDIDATES = 1024  # rare tokens, others at every pass, so that they are not forgotten


class StepResult(NamedTuple):
    """Sums over the blocks of a step (of this rank)."""

    loss: float
    blocks: int
    hits: Tensor  # [B-1]: leading slots that stood, a proxy of acceptance by position


class Gradient:
    """Computes gradients of the drafter's weights; knows nothing of optimisers and ranks."""

    def __init__(
        self,
        forward: Callable[..., Tensor],
        weights: TrainedWeights,
        borrowed: Borrowed,
        source: StateSource,
        config: TrainConfig,
        frequent: Tensor | None,
    ) -> None:
        self._forward = forward
        self._weights = weights
        self._borrowed = borrowed
        self._source = source
        self._config = config
        self._frequent = frequent  # [candidates] token ids, or None: score against all
        self._device = borrowed.embedding.device
        self._objective = Objective(
            config.distillation, config.position_weights, config.gamma, config.dpace_alpha
        )

    def accumulate(self, sequences: Sequence[Indexed], step: int, denominator: float) -> StepResult:
        """Add the gradients of these sequences' share of a step to the parameters' own."""
        slots = self._config.block_size - 1
        total, blocks, hits = 0.0, 0, torch.zeros(slots)
        for part in passes(sequences, self._config):
            loss, leading = self._one_pass(part, step, denominator)
            total += loss
            blocks += len(leading)
            hits += leading.float().sum(0).cpu()
        return StepResult(total, blocks, hits)

    def _one_pass(
        self, part: Sequence[Indexed], step: int, denominator: float
    ) -> tuple[float, Tensor]:
        config = self._config
        tokens, blocks = self._blocks(part, step)
        observed = self._source.observe(part)
        states = observed.states.to(self._device)
        if config.compile:  # one shape for every pass: compiling takes minutes
            states = F.pad(states, (0, 0, 0, config.max_length - states.shape[1]))
        drafted = drafted_slots(
            self._forward,
            states,
            observed.final.to(self._device),
            tokens,
            blocks,
        )
        scores, labels = self._scores(drafted.labels, step)
        teacher = drafted.teacher if config.distillation > 0 else None
        result = loss_of_slots(
            drafted.hidden,
            Slots(labels, drafted.counted, teacher),
            scores,
            self._objective,
            denominator,
        )
        result.loss.backward()  # type: ignore[no-untyped-call]
        self._weights.collect_gradients()
        return result.loss.item(), result.hits.long().cumprod(-1)

    def _blocks(self, part: Sequence[Indexed], step: int) -> tuple[Tensor, Blocks]:
        config = self._config
        sequences = [sequence for _, sequence in part]
        tokens, _, supervised = batch(sequences)
        anchors = [
            draw_anchors(s.prompt_length, len(s), config.anchors, config.seed, step, s.name)
            for s in sequences
        ]
        most = config.anchors if config.compile else max(len(chosen) for chosen in anchors)
        return tokens, make_blocks(anchors, tokens, supervised, config.block_size, most)

    def _scores(self, labels: Tensor, step: int) -> tuple[Scores, Tensor]:
        """The head over all tokens, or over the candidates and this pass's labels."""
        head = self._borrowed.head
        if self._frequent is None:
            return Scores(head), labels
        generator = torch.Generator().manual_seed(step)
        rare = torch.randint(len(head), (RANDOM_CANDIDATES,), generator=generator)
        wanted = torch.cat([self._frequent, rare.to(head.device), labels.flatten()])
        rows = torch.unique(wanted)  # ascending
        return Scores(head[rows]), torch.searchsorted(rows, labels)


def passes(sequences: Sequence[Indexed], config: TrainConfig) -> Iterator[list[Indexed]]:
    """Sequences of like length together, in passes of like size that the memory allows."""
    if not sequences:
        return
    by_length = sorted(sequences, key=lambda item: (len(item[1]), item[1].name))
    longest = config.max_length if config.compile else len(by_length[-1][1])
    per_row = longest + config.anchors * config.block_size
    most = max(1, config.micro_tokens // per_row)
    count = -(-len(by_length) // most)
    for number in range(count):
        first, end = (len(by_length) * edge // count for edge in (number, number + 1))
        yield by_length[first:end]
