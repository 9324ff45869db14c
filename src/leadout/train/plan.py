"""What a training run will take: sizes counted, time and memory measured on a few real steps."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict

from leadout.data.manifest import DataFolder
from leadout.evaluate.hidden_states import announce
from leadout.pairing import DraftShape, TargetSizes
from leadout.train.config import TrainConfig
from leadout.train.costs import FLOAT32, GIB, StatesSource, Work
from leadout.train.loop import sequences_of_step
from leadout.train.optimizer import make_optimizers, sum_gradients_over_ranks
from leadout.train.run import Corpus, Run

TIMED_STEPS = 2


class Plan(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int
    response_tokens: int
    layers: int
    anchors: int  # mean over the sequences
    batch_sequences: int
    steps: int
    blocks: int
    visits: float  # blocks per position of the training answers
    trained_parameters: int
    target_parameters: int
    states: StatesSource
    target_in_process: bool
    device: str
    ranks: int
    seconds_per_step: float  # with the target's states, where each step computes them
    seconds_for_states: float  # once, before they are on disk
    seconds_per_validation: float
    minutes: float
    drafter_gib: float  # weights, gradients and optimizer state of the drafter, on each rank
    target_gib: float  # what each rank holds of the target
    peak_memory_gib: float  # measured, of this process or its GPU
    device_memory_gib: float
    states_on_disk_gib: float
    checkpoint_gib: float

    def text(self) -> str:
        where = f"{self.ranks} x {self.device}" if self.ranks > 1 else self.device
        held = "all weights" if self.target_in_process else "embedding and head"
        once = f"{self.seconds_for_states / 60:.0f} minutes once for the target's states, "
        lines = [
            f"data      {self.samples:,} samples, {self.response_tokens:,} response tokens",
            f"drafter   {self.layers} layers, {self.trained_parameters:,} weights, for a target of "
            f"{self.target_parameters:,}",
            f"training  {self.steps:,} steps of {self.batch_sequences} sequences with about "
            f"{self.anchors} blocks: {self.blocks:,} blocks, {self.visits:.1f} for each position "
            "of the answers",
            f"states    {_STATES_TEXT[self.states]}",
            f"time      {self.minutes:.0f} minutes on {where}: {self.seconds_per_step:.2f} s per "
            f"step, {once if self.states == 'disk' else ''}"
            f"{self.seconds_per_validation:.0f} s per validation",
            f"memory    {self.peak_memory_gib:.1f} of {self.device_memory_gib:.1f} GiB at the peak "
            f"of {TIMED_STEPS} steps: {self.drafter_gib:.2f} for the drafter and its optimizer, "
            f"{self.target_gib:.2f} for the target ({held}), the rest for activations",
            f"disk      {self.states_on_disk_gib:.1f} GiB of states, "
            f"{self.checkpoint_gib:.2f} GiB of checkpoints",
            "expect    an acceptance length that is not known before training: it depends on "
            "target and traffic. The held-out curve of the run shows it",
        ]
        if self.peak_memory_gib > NEARLY_FULL * self.device_memory_gib:
            lines.append(
                "warning   memory is nearly full; longer sequences than those of the timed steps "
                "may not fit. Lower --micro-tokens or --anchors."
            )
        return "\n".join(lines)


NEARLY_FULL = 0.9
_STATES_TEXT = {
    "in process": "computed in every step by the target in this process",
    "disk": "computed once, then read from disk",
    "served": "from vLLM servers",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Of a run on this machine, with all its ranks."""

    seconds_per_step: float
    seconds_per_token: float  # to compute the target's hidden states
    seconds_per_validated: float  # held-out sequence


def time_steps(run: Run) -> Timing:
    """Time some steps of a run; its weights are useless afterwards.

    All ranks take part at the same time, each with its part of a step, and get the same result, the
    mean over ranks.
    """
    config, ranks = run.config, run.ranks.count
    held_out = run.corpus.split.validation[:ranks]  # one for each rank
    run.evaluate(held_out)  # loads the target
    batch = [run.fetch(i) for i in sequences_of_step(run.corpus.split.train, 0, config)]
    tokens = sum(len(sequence) for _, sequence in batch)
    part = batch[run.ranks.rank :: ranks]
    optimizers = make_optimizers(run.weights.masters, config, ranks)

    def observe() -> None:
        announce(run.source, part)  # as in training: servers compute several at a time
        for item in part:
            run.source.observe([item])

    def step() -> None:
        run.weights.clear_gradients()
        announce(run.source, (item for each in run.gradient.passes(part) for item in each))
        # The last step, because the first may have shorter blocks.
        run.gradient.accumulate(part, run.steps - 1, run.blocks_per_step)
        if ranks > 1 and not run.weights.sharded:  # those are already summed
            sum_gradients_over_ranks(run.weights.masters.values())
        for optimizer in optimizers:
            optimizer.step()

    for_states = _seconds_of(observe)
    validating = _seconds_of(lambda: run.evaluate(held_out)) / len(held_out)
    seconds = min(_seconds_of(step) for _ in range(TIMED_STEPS))
    own = torch.tensor([seconds, for_states / tokens, validating], dtype=torch.float64)
    return Timing(*(run.ranks.sum(own) / ranks).tolist())


def source_of(run: Run) -> StatesSource:
    """Where a run's states come from."""
    return planned_source(run.config, served=not run.target_in_process)


def planned_source(config: TrainConfig, *, served: bool) -> StatesSource:
    """Where the states of a run with these complete settings will come from.

    States on disk may have been computed by a server (`served`) or in this process.
    """
    if config.states == "disk":
        return "disk"
    return "served" if served else "in process"


def work_of(run: Run, sizes: TargetSizes) -> Work:
    """The costs of a run, whose drafter may have any shape."""
    config, corpus = run.drafter_config, run.corpus
    shape = DraftShape(
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    )
    length = sum(corpus.lengths) / len(corpus.lengths)
    return Work(
        sizes,
        shape,
        config.num_layers,
        len(config.target_layer_ids),
        config.block_size,
        run.config.anchors,
        length,
        run.config.candidates,
    )


def answer_positions(corpus: Corpus) -> int:
    """Positions of the training answers, each of which can be the anchor of a block."""
    return sum(max(1, corpus.answers[index] - 1) for index in corpus.split.train)


def make_plan(run: Run, data: DataFolder, sizes: TargetSizes) -> Plan:
    config, steps = run.config, run.steps
    device, source, work = run.ranks.device, source_of(run), work_of(run, sizes)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    timing = time_steps(run)
    validating = timing.seconds_per_validated * len(run.corpus.split.validation)
    validations = math.ceil(steps / config.validate_every)
    # In process, every step computes its states and was timed with them.
    tokens = _tokens_kept(run) if source == "disk" else 0
    for_states = tokens * timing.seconds_per_token
    blocks = round(steps * run.blocks_per_step)
    bytes_per_value = FLOAT32 if config.precision == "float32" else 2
    return Plan(
        samples=len(run.corpus.samples),
        response_tokens=data.response_tokens,
        layers=work.layers,
        anchors=round(run.blocks_per_step / config.batch_sequences),
        batch_sequences=config.batch_sequences,
        steps=steps,
        blocks=blocks,
        visits=blocks / answer_positions(run.corpus),
        trained_parameters=sum(p.numel() for p in run.drafter.parameters()),
        target_parameters=sizes.parameters,
        states=source,
        target_in_process=run.target_in_process,
        device=_name_of(device),
        ranks=run.ranks.count,
        seconds_per_step=timing.seconds_per_step,
        seconds_for_states=for_states,
        seconds_per_validation=validating,
        minutes=(steps * timing.seconds_per_step + for_states + validations * validating) / 60,
        drafter_gib=work.weight_bytes(
            optimizer=config.optimizer,
            precision=str(run.computed_in).removeprefix("torch."),
            shards=run.ranks.count if config.sharded else 1,
        )
        / GIB,
        target_gib=work.target_bytes(
            "in process" if run.target_in_process else "served",
            bytes_per_weight=run.computed_in.itemsize,
        )
        / GIB,
        peak_memory_gib=_peak_memory(device) / GIB,
        device_memory_gib=_memory_of(device) / GIB,
        states_on_disk_gib=tokens * work.state_bytes_per_token(bytes_per_value) / GIB,
        checkpoint_gib=work.checkpoint_bytes / GIB,
    )


def _tokens_kept(run: Run) -> float:
    """The tokens whose states are computed once and kept: a short run does not see all samples."""
    lengths, parts = run.corpus.lengths, run.corpus.split
    trained = sum(lengths[index] for index in set(parts.train))
    held_out = sum(lengths[index] for index in parts.validation)
    return min(1.0, run.config.passes) * trained + held_out


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def _memory_of(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _peak_memory(device: torch.device) -> float:
    """Of the GPU, or of this process: bytes."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _seconds_of(work: Callable[[], object]) -> float:
    """GPUs compute asynchronously: waits for them before and after."""
    _wait()
    began = time.monotonic()
    work()
    _wait()
    return time.monotonic() - began


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
