"""The training loop: gradient steps, validations and checkpoints; continues an interrupted run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leadout.evaluate.acceptance import Validation
from leadout.evaluate.blocks import Blocks, batch, drafted_slots, draw_anchors, make_blocks
from leadout.evaluate.hidden_states import Indexed, StateSource
from leadout.evaluate.ranks import Ranks
from leadout.evaluate.target_weights import TargetWeights
from leadout.train.config import TrainConfig, TrainError
from leadout.train.objective import Objective, Scores, Slots, loss_of_slots
from leadout.train.optimizer import (
    MasterWeights,
    learning_rate_at,
    make_optimizers,
    set_learning_rate,
    sum_gradients_over_ranks,
)
from leadout.train.progress import Listener, Log, StepRecord, ValidationRecord
from leadout.train.run_state import RunStatus, load_state, save_best, save_state

# Rare tokens added to the candidates, drawn again in every step so that none is forgotten.
RANDOM_CANDIDATES = 1024


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C during training."""

    def __init__(self, saved_step: int, steps: int) -> None:
        super().__init__()
        self.saved_step = saved_step  # of the last checkpoint, from which the run continues
        self.steps = steps


class Loop:
    """One run. `fetch` returns training sequences by index; `validate` evaluates the drafter."""

    def __init__(
        self,
        folder: Path,
        weights: MasterWeights,
        gradient: Gradient,
        config: TrainConfig,
        ranks: Ranks,
        train: Sequence[int],
        fetch: Callable[[int], Indexed],
        validate: Callable[[], Validation],
        listen: Listener,
    ) -> None:
        self._folder = folder
        self._weights = weights
        self._gradient = gradient
        self._config = config
        self._ranks = ranks
        self._train = train
        self._fetch = fetch
        self._validate = validate
        self._listen = listen
        self._optimizers = make_optimizers(weights.masters, config)
        self.steps = total_steps(len(train), config)
        self._saved_step = 0
        self._can_save = False  # weights, optimizers and status belong to the same step

    def run(self) -> RunStatus:
        """Train to the end, or until --patience runs out."""
        status = load_state(self._folder, self._weights, self._optimizers) or RunStatus()
        self._saved_step = status.step
        try:
            self._run_from(status)
        except KeyboardInterrupt:
            if self._can_save and self._ranks.is_leader and status.step > self._saved_step:
                self._save(status)
            raise TrainingInterrupted(self._saved_step, self.steps) from None
        self._ranks.barrier()
        return status

    def _run_from(self, status: RunStatus) -> None:
        log = Log(self._folder, status.step) if self._ranks.is_leader else None
        listeners: list[Listener] = [log, self._listen] if log else []
        before = status.seconds
        started = time.monotonic()

        def seconds() -> float:
            return before + time.monotonic() - started

        while not status.finished:
            self._can_save = True
            record = self._step(status.step, seconds)
            status.step += 1
            for listener in listeners:
                listener(record)
            is_last = status.step == self.steps
            if is_last or status.step % self._config.validate_every == 0:
                self._validate_and_keep_best(status, listeners, seconds)
            status.finished = self._ranks.broadcast(is_last or self._is_out_of_patience(status))
            status.seconds = seconds()
            if self._ranks.is_leader and (
                status.finished or status.step % self._config.save_every == 0
            ):
                self._save(status)

    def _step(self, step: int, seconds: Callable[[], float]) -> StepRecord:
        began = time.monotonic()
        self._weights.clear_gradients()
        indices = sequences_of_step(self._train, step, self._config)
        own = [self._fetch(index) for index in indices[self._ranks.rank :: self._ranks.count]]
        denominator = float(self._config.batch_sequences * self._config.anchors)
        result = self._gradient.accumulate(own, step, denominator)
        masters = self._weights.masters.values()
        if self._ranks.count > 1:
            sum_gradients_over_ranks(masters)
        norm = nn.utils.clip_grad_norm_(masters, self._config.clip)
        if not torch.isfinite(norm):
            raise TrainError(
                f"The gradient norm at step {step + 1} is {norm.item()}. Lower --learning-rate, "
                "or check that the target's weights are complete."
            )
        rate = learning_rate_at(step, self.steps, self._config)
        set_learning_rate(self._optimizers, rate)
        self._can_save = False  # until the step is complete and logged
        for optimizer in self._optimizers:
            optimizer.step()
        self._weights.update_drafter()
        local = torch.tensor([result.loss, result.blocks, result.hits.sum().item()])
        loss, blocks, hits = self._ranks.sum(local).tolist()
        return StepRecord(
            step=step + 1,
            seconds=seconds(),
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm.item(),
            blocks_per_second=blocks / (time.monotonic() - began),
            drafts_hit=1 + hits / max(blocks, 1),
        )

    def _validate_and_keep_best(
        self, status: RunStatus, listeners: Sequence[Listener], seconds: Callable[[], float]
    ) -> None:
        validation = self._validate()
        acceptance = validation.overall.acceptance_length
        if acceptance > status.best_acceptance:
            status.best_acceptance, status.best_step = acceptance, status.step
            status.validations_without_gain = 0
            if self._ranks.is_leader:
                save_best(self._folder, self._weights)
        else:
            status.validations_without_gain += 1
        record = ValidationRecord(step=status.step, seconds=seconds(), validation=validation)
        for listener in listeners:
            listener(record)

    def _is_out_of_patience(self, status: RunStatus) -> bool:
        patience = self._config.patience
        return patience is not None and status.validations_without_gain >= patience

    def _save(self, status: RunStatus) -> None:
        save_state(self._folder, self._weights, self._optimizers, status)
        self._saved_step = status.step


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
        self._objective = Objective(
            config.distillation, config.position_weights, config.gamma, config.dpace_alpha
        )

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
        drafted = drafted_slots(
            self._forward, states, observed.final.to(self._device), tokens, blocks
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
        count = config.anchors if config.compile else max(len(drawn) for drawn in anchors)
        return tokens, make_blocks(anchors, tokens, supervised, config.block_size, count)

    def _scores(self, labels: Tensor, step: int) -> tuple[Scores, Tensor]:
        """The head over the whole vocabulary, or over the candidates and this pass's labels."""
        if self._frequent is None:
            return Scores(self._head), labels
        generator = torch.Generator().manual_seed(step)
        rare = torch.randint(len(self._head), (RANDOM_CANDIDATES,), generator=generator)
        every = torch.cat([self._frequent, rare.to(self._head.device), labels.flatten()])
        rows = torch.unique(every)  # ascending
        return Scores(self._head[rows]), torch.searchsorted(rows, labels)


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
