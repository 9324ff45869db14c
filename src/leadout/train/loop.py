"""The training loop: gradient steps, validations and checkpoints; continues an interrupted run."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import nn

from leadout.evaluate.hidden_states import Indexed, announce
from leadout.train.config import TrainConfig, TrainError
from leadout.train.loader import Loader
from leadout.train.optimizer import learning_rate_at, make_optimizers, sum_gradients_over_ranks
from leadout.train.progress import Listener, Log, Record, StepRecord, ValidationRecord
from leadout.train.sharding import whole
from leadout.train.state import (
    RunStatus,
    load_state,
    save_best,
    save_state,
)

if TYPE_CHECKING:
    from leadout.train.run import Run


PATIENCE = 5.0  # seconds; signals within them are one request to stop


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
        self._optimizers = make_optimizers(run.weights.masters, run.config, run.ranks.count)
        self._status = load_state(run.folder, run.weights, self._optimizers) or RunStatus()
        self._log = Log(run.folder, self._status.step) if run.ranks.is_leader else None
        self._saved_step = self._status.step
        self._can_save = False  # weights, optimizers and status belong to the same step
        self._asked_to_stop: float | None = None  # when
        self._started = time.monotonic() - self._status.seconds

    def train(self) -> RunStatus:
        run, status = self._run, self._status
        try:
            with (
                self._signals_wait_for_all_ranks(),
                Loader(
                    self._parts_of,
                    run.gradient.prepare,
                    status.step,
                    run.steps,
                    pinned=run.ranks.device.type == "cuda",
                ) as loader,
            ):
                while not status.finished:
                    self._step_and_save(loader)
        except KeyboardInterrupt:
            # Other ranks may be in another step, and a sharded checkpoint needs all of them.
            alone = run.ranks.is_leader and not run.weights.sharded
            if self._can_save and alone and status.step > self._saved_step:
                self._save()
            raise TrainingInterrupted(self._saved_step, run.steps) from None
        run.ranks.barrier()
        return status

    @contextmanager
    def _signals_wait_for_all_ranks(self) -> Iterator[None]:
        """With several ranks, the first signal is only noted: all ranks stop after the same step.

        A rank that left at once would leave the others waiting for it, with nothing saved. A
        signal some seconds later interrupts as usual; torchrun and the scheduler may both send
        the first.
        """
        numbers: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)
        if self._run.ranks.count == 1 or threading.current_thread() is not threading.main_thread():
            numbers = ()

        def note(_signal: int, _frame: FrameType | None) -> None:
            now = time.monotonic()
            if self._asked_to_stop is not None and now > self._asked_to_stop + PATIENCE:
                raise KeyboardInterrupt
            self._asked_to_stop = self._asked_to_stop or now

        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _parts_of(self, step: int) -> list[list[Indexed]]:
        """The sequences of each of this rank's passes in a step."""
        run, ranks = self._run, self._run.ranks
        indices = sequences_of_step(run.corpus.split.train, step, run.config)
        own = [run.fetch(index) for index in indices[ranks.rank :: ranks.count]]
        parts = run.gradient.passes(own)
        announce(run.source, (item for part in parts for item in part))
        return parts

    def _step_and_save(self, loader: Loader) -> None:
        run, config, status = self._run, self._run.config, self._status
        self._can_save = True
        record = self._step(loader)
        status.step += 1
        self._report(record)
        finished = status.step == run.steps
        if finished or status.step % config.validate_every == 0:
            self._validate_and_keep_best()
        if config.patience is not None and status.validations_without_gain >= config.patience:
            finished = True
        finished = finished and run.ranks.is_leader  # who knows the validations
        status.finished, stops = run.ranks.any(finished, self._asked_to_stop is not None)
        status.seconds = self._seconds()
        writes = run.ranks.is_leader or run.weights.sharded
        if writes and (status.finished or stops or status.step % config.save_every == 0):
            self._save()
        if stops and not status.finished:
            raise TrainingInterrupted(self._saved_step, run.steps)

    def _step(self, loader: Loader) -> StepRecord:
        run, config, ranks = self._run, self._run.config, self._run.ranks
        began, step = time.monotonic(), self._status.step
        run.weights.clear_gradients()
        count, inputs = loader.passes_of(step)
        result = run.gradient.add(inputs, count, step, run.blocks_per_step)
        masters = list(run.weights.masters.values())
        if ranks.count > 1 and not run.weights.sharded:  # those are already summed
            sum_gradients_over_ranks(masters)
        gradients = [master.grad for master in masters if master.grad is not None]
        norm = whole(nn.utils.get_total_norm(gradients))
        nn.utils.clip_grads_with_norm_(masters, config.clip, norm)
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
            save_best(self._run.folder, self._run.weights, self._run.ranks)
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
        run = self._run
        save_state(run.folder, run.weights, self._optimizers, self._status, run.ranks)
        self._saved_step = self._status.step

    def _seconds(self) -> float:
        """Time spent on training, including that before an interruption."""
        return time.monotonic() - self._started


def total_steps(sequences: int, config: TrainConfig) -> int:
    return max(1, round(config.passes * sequences / config.batch_sequences))


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
