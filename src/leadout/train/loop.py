"""The training loop: steps, validations, checkpoints; continues where it was cut off."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from leadout.train.config import TrainConfig
from leadout.train.log import Listener, Log, StepRecord, ValidationRecord
from leadout.train.optimizer import (
    clip_gradients,
    learning_rate_at,
    make_optimizers,
    set_learning_rate,
    sum_over_ranks,
)
from leadout.train.ranks import Ranks
from leadout.train.state import RunNumbers, load_state, save_best, save_state
from leadout.train.states import Indexed
from leadout.train.step import Gradient
from leadout.train.validate import Validation
from leadout.train.weights import TrainedWeights


class Loop:
    """One run. `fetch` gives training sequences by number; `validate` judges the drafter."""

    def __init__(
        self,
        folder: Path,
        weights: TrainedWeights,
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

    def run(self) -> RunNumbers:
        """Train to the end, or until nothing is gained any more."""
        numbers = load_state(self._folder, self._weights, self._optimizers) or RunNumbers()
        log = Log(self._folder, numbers.step) if self._ranks.leads else None
        listeners: list[Listener] = [log, self._listen] if log else []
        before = numbers.seconds
        started = time.monotonic()
        while not numbers.finished:
            record = self._step(numbers.step, lambda: before + time.monotonic() - started)
            numbers.step += 1
            for listener in listeners:
                listener(record)
            last = numbers.step == self.steps
            if last or numbers.step % self._config.validate_every == 0:
                self._judge(numbers, listeners, lambda: before + time.monotonic() - started)
            numbers.finished = self._ranks.agree(last or self._is_out_of_patience(numbers))
            numbers.seconds = before + time.monotonic() - started
            if self._ranks.leads and (
                numbers.finished or numbers.step % self._config.save_every == 0
            ):
                save_state(self._folder, self._weights, self._optimizers, numbers)
        self._ranks.wait()
        return numbers

    def _step(self, step: int, seconds: Callable[[], float]) -> StepRecord:
        began = time.monotonic()
        self._weights.clear_gradients()
        batch = sequences_of_step(self._train, step, self._config)
        own = [self._fetch(index) for index in batch[self._ranks.rank :: self._ranks.count]]
        denominator = float(self._config.batch_sequences * self._config.anchors)
        result = self._gradient.accumulate(own, step, denominator)
        if self._ranks.count > 1:
            sum_over_ranks(self._weights.masters.values())
        norm = clip_gradients(self._weights.masters.values(), self._config.clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"step {step + 1}: found a gradient norm of {norm.item()}, wanted a finite one; "
                "lower --learning-rate, or check the target's weights"
            )
        rate = learning_rate_at(step, self.steps, self._config)
        set_learning_rate(self._optimizers, rate)
        for optimizer in self._optimizers:
            optimizer.step()
        self._weights.publish()
        local = torch.tensor([result.loss, result.blocks, result.hits.sum().item()])
        loss, blocks, hits = self._ranks.add(local).tolist()
        return StepRecord(
            step=step + 1,
            seconds=seconds(),
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm.item(),
            blocks_per_second=blocks / (time.monotonic() - began),
            drafts_hit=1 + hits / max(blocks, 1),
        )

    def _judge(
        self, numbers: RunNumbers, listeners: Sequence[Listener], seconds: Callable[[], float]
    ) -> None:
        validation = self._validate()
        reached = validation.overall.acceptance_length
        if reached > numbers.best_acceptance:
            numbers.best_acceptance, numbers.best_step = reached, numbers.step
            numbers.validations_without_gain = 0
            if self._ranks.leads:
                save_best(self._folder, self._weights)
        else:
            numbers.validations_without_gain += 1
        record = ValidationRecord(step=numbers.step, seconds=seconds(), validation=validation)
        for listener in listeners:
            listener(record)

    def _is_out_of_patience(self, numbers: RunNumbers) -> bool:
        patience = self._config.patience
        return patience is not None and numbers.validations_without_gain >= patience


def total_steps(sequences: int, config: TrainConfig) -> int:
    return max(1, round(config.epochs * sequences / config.batch_sequences))


def sequences_of_step(train: Sequence[int], step: int, config: TrainConfig) -> list[int]:
    """The samples of a step: passes over the data, each in a new order, cut into batches."""
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
