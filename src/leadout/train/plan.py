"""What a training run will take: sizes counted, time measured on a few real steps."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from pydantic import BaseModel, ConfigDict

from leadout.data.manifest import DataFolder
from leadout.train.loop import sequences_of_step
from leadout.train.run import Run
from leadout.train.state import make_optimizers

TIMED_STEPS = 2
# Held-out acceptance length of a drafter for SmolLM2-135M-Instruct (2 layers, B = 8) after so many
# training blocks; results/train/smollm2.json has the whole curve.
MEASURED: tuple[tuple[float, float], ...] = (
    (204_800, 1.63),
    (409_600, 1.86),
    (614_400, 2.04),
    (819_200, 2.18),
    (1_024_000, 2.27),
    (1_228_800, 2.30),
    (1_323_008, 2.31),
)
# Below this, drafting and verifying usually cost more time than the accepted drafts save.
MIN_USEFUL_ACCEPTANCE = 1.5


class Plan(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int
    response_tokens: int
    steps: int
    blocks: int
    trained_parameters: int
    seconds_per_step: float
    seconds_for_states: float
    seconds_per_validation: float
    minutes: float
    peak_memory_gib: float
    states_on_disk_gib: float
    checkpoint_gib: float
    expected_acceptance_length: float
    expectation_from: str

    def text(self) -> str:
        expected = self.expected_acceptance_length
        lines = [
            f"data      {self.samples:,} samples, {self.response_tokens:,} response tokens",
            f"training  {self.steps:,} steps, {self.blocks:,} blocks, "
            f"{self.trained_parameters:,} weights",
            f"time      {self.minutes:.0f} minutes: {self.seconds_per_step:.2f} s per step, "
            f"{self.seconds_for_states / 60:.0f} minutes for the target's states, "
            f"{self.seconds_per_validation:.0f} s per validation",
            f"memory    {self.peak_memory_gib:.1f} GiB at the peak of {TIMED_STEPS} steps",
            f"disk      {self.states_on_disk_gib:.1f} GiB of states, "
            f"{self.checkpoint_gib:.2f} GiB of checkpoints",
            f"expect    an acceptance length of about {expected:.1f} ({self.expectation_from})",
        ]
        if expected < MIN_USEFUL_ACCEPTANCE:
            blocks = blocks_for(MIN_USEFUL_ACCEPTANCE)
            lines.append(
                f"warning   too low to be useful: below about {MIN_USEFUL_ACCEPTANCE} a drafter "
                f"usually slows serving down. Expect to need {blocks / self.blocks:.0f} times the "
                f"training: about {blocks:,.0f} blocks, from more data (`leadout data`) or more "
                "--epochs."
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Timing:
    """Of a run on this machine, with all its ranks."""

    seconds_per_step: float
    seconds_per_token: float  # to compute the target's hidden states
    seconds_per_validated: float  # held-out sequence


def time_steps(run: Run) -> Timing:
    """Time some steps of a run; its weights are useless afterwards."""
    config, ranks = run.config, run.ranks.count
    held_out = run.corpus.split.validation
    run.evaluate(held_out[:1])  # loads the target
    batch = [run.fetch(i) for i in sequences_of_step(run.corpus.split.train, 0, config)]
    tokens = sum(len(sequence) for _, sequence in batch)
    for_states = _seconds_of(lambda: [run.source.observe([item]) for item in batch])
    validating = _seconds_of(lambda: run.evaluate(held_out[:1]))
    optimizers = make_optimizers(run.weights.masters, config)

    def step() -> None:
        run.weights.clear_gradients()
        run.gradient.accumulate(batch, 0, float(len(batch) * config.anchors))
        for optimizer in optimizers:
            optimizer.step()

    seconds = min(_seconds_of(step) for _ in range(TIMED_STEPS))
    return Timing(seconds / ranks, for_states / tokens / ranks, validating / ranks)


def make_plan(run: Run, data: DataFolder) -> Plan:
    config, steps = run.config, run.steps
    timing = time_steps(run)
    validating = timing.seconds_per_validated * len(run.corpus.split.validation)
    validations = math.ceil(steps / config.validate_every)
    on_disk = config.states == "disk"
    all_tokens = sum(run.corpus.lengths)
    passes = 1.0 if on_disk else config.epochs
    for_states = passes * all_tokens * timing.seconds_per_token
    weights = sum(p.numel() for p in run.drafter.parameters())
    width = (len(run.drafter_config.target_layer_ids) + 1) * run.drafter_config.context_size
    blocks = steps * config.batch_sequences * config.anchors
    return Plan(
        samples=len(run.corpus.samples),
        response_tokens=data.response_tokens,
        steps=steps,
        blocks=blocks,
        trained_parameters=weights,
        seconds_per_step=timing.seconds_per_step,
        seconds_for_states=for_states,
        seconds_per_validation=validating,
        minutes=(steps * timing.seconds_per_step + for_states + validations * validating) / 60,
        peak_memory_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        states_on_disk_gib=all_tokens * width * 2 / 2**30 if on_disk else 0.0,
        checkpoint_gib=weights * 4 * 4 / 2**30,
        expected_acceptance_length=expected_acceptance(blocks),
        expectation_from="measured after as many blocks on SmolLM2-135M-Instruct, "
        "results/train/smollm2.json; other targets and traffic differ",
    )


def _seconds_of(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def expected_acceptance(blocks: float) -> float:
    """Interpolated between measured points, linearly in the logarithm of the blocks.

    Before the first point, linearly from 1 (no draft accepted); after the last, constant.
    """
    points = sorted(MEASURED)
    first, length = points[0]
    if blocks <= first:
        return 1 + (length - 1) * blocks / first
    for (x0, y0), (x1, y1) in pairwise(points):
        if blocks <= x1:
            share = math.log(blocks / x0) / math.log(x1 / x0)
            return y0 + share * (y1 - y0)
    return points[-1][1]


def blocks_for(acceptance: float) -> float:
    """The blocks after which this acceptance length is expected; at most the measured ones."""
    low, high = 0.0, MEASURED[-1][0]
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_acceptance(middle) < acceptance else (low, middle)
    return high
