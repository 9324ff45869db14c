"""The training loop: gradient steps, validations and checkpoints; continues an interrupted run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leadout.evaluate.blocks import Blocks, batch, drafted_slots, draw_anchors, make_blocks
from leadout.evaluate.hidden_states import Indexed, StateSource
from leadout.evaluate.target_weights import TargetWeights
from leadout.train.config import TrainConfig, TrainError
from leadout.train.objective import Slots, loss_of_slots
from leadout.train.progress import Listener, Log, Record, StepRecord, ValidationRecord
from leadout.train.state import (
    MasterWeights,
    RunStatus,
    learning_rate_at,
    load_state,
    make_optimizers,
    save_best,
    save_state,
    sum_gradients_over_ranks,
)

if TYPE_CHECKING:
    from leadout.train.run import Run

# Rare tokens added to the candidates, drawn again in every step so that none is forgotten.
RANDOM_CANDIDATES = 1024


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C during training."""

    def __init__(self, saved_step: int, steps: int) -> None:
        super().__init__()
        self.saved_step = saved_step  # of the last checkpoint, from which the run continues
        self.steps = steps


class Loop:
    """Trains a run to its end, or until --patience runs out."""

    def __init__(self, run: Run, listen: Listener) -> None:
        self._run = run
        self._listen = listen
        self._optimizers = make_optimizers(run.weights.masters, run.config)
        self._status = load_state(run.folder, run.weights, self._optimizers) or RunStatus()
        self._log = Log(run.folder, self._status.step) if run.ranks.is_leader else None
        self._saved_step = self._status.step
        self._can_save = False  # weights, optimizers and status belong to the same step
        self._started = time.monotonic() - self._status.seconds

    def train(self) -> RunStatus:
        run, status = self._run, self._status
        try:
            while not status.finished:
                self._step_and_save()
        except KeyboardInterrupt:
            if self._can_save and run.ranks.is_leader and status.step > self._saved_step:
                self._save()
            raise TrainingInterrupted(self._saved_step, run.steps) from None
        run.ranks.barrier()
        return status

    def _step_and_save(self) -> None:
        run, config, status = self._run, self._run.config, self._status
        self._can_save = True
        record = self._step()
        status.step += 1
        self._report(record)
        finished = status.step == run.steps
        if finished or status.step % config.validate_every == 0:
            self._validate_and_keep_best()
        if config.patience is not None and status.validations_without_gain >= config.patience:
            finished = True
        status.finished = run.ranks.broadcast(finished)
        status.seconds = self._seconds()
        if run.ranks.is_leader and (status.finished or status.step % config.save_every == 0):
            self._save()

    def _step(self) -> StepRecord:
        run, config, ranks = self._run, self._run.config, self._run.ranks
        began, step = time.monotonic(), self._status.step
        run.weights.clear_gradients()
        indices = sequences_of_step(run.corpus.split.train, step, config)
        own = [run.fetch(index) for index in indices[ranks.rank :: ranks.count]]
        denominator = float(config.batch_sequences * config.anchors)
        result = run.gradient.accumulate(own, step, denominator)
        masters = run.weights.masters.values()
        if ranks.count > 1:
            sum_gradients_over_ranks(masters)
        norm = nn.utils.clip_grad_norm_(masters, config.clip)
        if not torch.isfinite(norm):
            raise TrainError(
                f"The gradient norm at step {step + 1} is {norm.item()}. Lower --learning-rate, "
                "or check that the target's weights are complete."
            )
        rate = learning_rate_at(step, run.steps, config)
        self._can_save = False  # until the step is complete and logged
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        run.weights.update_drafter()
        local = torch.tensor([result.loss, result.blocks, result.hits.sum().item()])
        loss, blocks, hits = ranks.sum(local).tolist()
        return StepRecord(
            step=step + 1,
            seconds=self._seconds(),
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm.item(),
            blocks_per_second=blocks / (time.monotonic() - began),
            drafts_hit=1 + hits / max(blocks, 1),
        )

    def _validate_and_keep_best(self) -> None:
        status = self._status
        validation = self._run.validate()
        acceptance = validation.overall.acceptance_length
        if acceptance > status.best_acceptance:
            status.best_acceptance, status.best_step = acceptance, status.step
            status.validations_without_gain = 0
            if self._run.ranks.is_leader:
                save_best(self._run.folder, self._run.weights)
        else:
            status.validations_without_gain += 1
        self._report(
            ValidationRecord(step=status.step, seconds=self._seconds(), validation=validation)
        )

    def _report(self, record: Record) -> None:
        if self._log is not None:
            self._log(record)
            self._listen(record)

    def _save(self) -> None:
        save_state(self._run.folder, self._run.weights, self._optimizers, self._status)
        self._saved_step = self._status.step

    def _seconds(self) -> float:
        """Time spent on training, including that before an interruption."""
        return time.monotonic() - self._started


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
    ) -> None:
        self._forward = forward
        self._weights = weights
        self._head = target_weights.head
        self._source = source
        self._config = config
        self._frequent = frequent  # [candidates] token ids, or None: score the whole vocabulary
        self._device = target_weights.embedding.device

    def accumulate(self, sequences: Sequence[Indexed], step: int, denominator: float) -> StepResult:
        """Add the gradients of these sequences' part of a step to the master weights' own."""
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
        """The loss, and which slots [blocks, B-1] are right along with all slots before them."""
        config = self._config
        tokens, blocks = self._blocks(part, step)
        observed = self._source.observe(part)
        states = observed.states.to(self._device)
        if config.compile:  # one shape for every pass: compiling takes minutes
            states = F.pad(states, (0, 0, 0, config.max_length - states.shape[1]))
        final = observed.final.to(self._device)
        drafted = drafted_slots(self._forward, states, final, tokens, blocks)
        head, labels = self._candidates(drafted.labels, step)
        teacher = drafted.teacher if config.distillation > 0 else None
        slots = Slots(labels, drafted.counted, teacher)
        loss, hits = loss_of_slots(drafted.hidden, slots, head, config, denominator)
        loss.backward()  # type: ignore[no-untyped-call]
        self._weights.collect_gradients()
        return loss.item(), hits.long().cumprod(-1)

    def _blocks(self, part: Sequence[Indexed], step: int) -> tuple[Tensor, Blocks]:
        config = self._config
        sequences = [sequence for _, sequence in part]
        tokens, _, supervised = batch(sequences)
        anchors = [
            draw_anchors(s.prompt_length, len(s), config.anchors, config.seed, step, s.name)
            for s in sequences
        ]
        count = config.anchors if config.compile else max(len(drawn) for drawn in anchors)
        return tokens, make_blocks(anchors, tokens, supervised, config.block_size, count)

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


def passes(sequences: Sequence[Indexed], config: TrainConfig) -> Iterator[list[Indexed]]:
    """Group sequences of similar length into passes of at most `micro_tokens` tokens."""
    if not sequences:
        return
    by_length = sorted(sequences, key=lambda item: (len(item[1]), item[1].name))
    longest = config.max_length if config.compile else len(by_length[-1][1])
    per_row = longest + config.anchors * config.block_size
    max_rows = max(1, config.micro_tokens // per_row)
    count = -(-len(by_length) // max_rows)
    for number in range(count):
        first, end = (len(by_length) * edge // count for edge in (number, number + 1))
        yield by_length[first:end]


def total_steps(sequences: int, config: TrainConfig) -> int:
    return max(1, round(config.epochs * sequences / config.batch_sequences))


def sequences_of_step(train: Sequence[int], step: int, config: TrainConfig) -> list[int]:
    """The samples of a step: epochs over the data, each in a new order, cut into batches."""
    size = config.batch_sequences
    chosen: list[int] = []
    place = step * size
    while len(chosen) < size:
        epoch, offset = divmod(place, len(train))
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + epoch)
        order = torch.randperm(len(train), generator=generator)
        part = order[offset : offset + size - len(chosen)].tolist()
        chosen += [train[i] for i in part]
        place += len(part)
    return chosen
