"""What a tuning is asked to do, whom it tells how far it is, and how it says that it cannot."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, repeat
from pathlib import Path
from typing import Protocol

import torch
from pydantic import BaseModel, ConfigDict

from leadout.engine.calibration import BARE_STEPS, DRAFTING_STEPS, RoundRequest
from leadout.errors import LeadoutError


class TuneError(LeadoutError):
    """The pair cannot be tuned as asked."""


@dataclass(frozen=True, slots=True)
class TuneRequest:
    target: str
    drafter: str
    prompts: tuple[str, ...]
    max_batch: int
    dtype: str


class Progress(Protocol):
    def stage(self, name: str, total: int) -> Callable[[], None]:
        """Begin a stage of so many steps; what comes back is called after each of them."""


# Which rounds a tuning measures, and about how long they take.

TOKENS = 40  # of each request and K
# Small batches are measured twice: they give few requests and short rounds.
TWICE_UP_TO = 4
# Fewer requests say too little of acceptance; the largest batch is measured as often as it takes.
LEAST_REQUESTS = 20  # with each K
SPARSE_DRAFTS = (0, 1, 2, 3, 5, 7, 11)
ALL_DRAFTS_UP_TO = 5
_ENGINE_START_SECONDS = 30.0
# A step also waits for Python and for attention; and the slowest request of a batch ends a round.
_OVERHEAD, _STEPS_OF_A_TOKEN = 1.6, 1.0
_PROBE_SIZE, _PROBE_ROWS = 4096, 64


def batch_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, ... and the largest itself."""
    powers = [2**power for power in range(max_batch.bit_length())]
    return sorted({*powers, max_batch})


def draft_counts(most: int) -> list[int]:
    """Every K of a short block; of a long one fewer and fewer, as they differ less and less."""
    if most <= ALL_DRAFTS_UP_TO:
        return list(range(most + 1))
    return [*(k for k in SPARSE_DRAFTS if k < most), most]


def make_rounds(max_batch: int, most: int, prompts: int) -> list[RoundRequest]:
    """Every K at every batch size; a batch answers the same prompts with each K."""
    shuffled = random.Random(0)
    numbers = shuffled.sample(range(prompts), prompts)
    next_prompt = cycle(numbers)
    rounds = []
    for batch in _batches(max_batch):
        asked = list(islice(next_prompt, batch))
        counts = draft_counts(most)
        shuffled.shuffle(counts)
        rounds += [RoundRequest(batch=batch, k=k, prompts=asked) for k in counts]
    return rounds


def _batches(max_batch: int) -> list[int]:
    """In the order in which they are measured, some of them again."""
    sizes = batch_sizes(max_batch)
    batches = [*sizes, *(size for size in sizes if size <= TWICE_UP_TO)]
    missing = LEAST_REQUESTS - sum(batches)
    return [*batches, *repeat(max_batch, math.ceil(max(missing, 0) / max_batch))]


class TunePlan(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_sizes: list[int]
    draft_counts: list[int]
    rounds: int
    prompts: int
    minutes: float

    def text(self) -> str:
        return (
            f"{self.rounds} rounds: batch sizes {_listed(self.batch_sizes)} with K "
            f"{_listed(self.draft_counts)}, {self.prompts} prompts, {TOKENS} tokens each\n"
            f"about {self.minutes:.0f} minutes, two engine starts included; on a busy machine more"
        )


def product_seconds(rows: int) -> float:
    """The best of three products of `rows` tokens with one matrix, where vLLM would compute."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=torch.bfloat16, device=device)
    tokens = torch.ones(rows, _PROBE_SIZE, dtype=torch.bfloat16, device=device)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        (tokens @ matrix.T).sum().item()  # waits for the device
        times.append(time.perf_counter() - began)
    return min(times)


def make_plan(
    target: Path,
    rounds: Sequence[RoundRequest],
    prompts: int,
    clock: Callable[[int], float] = product_seconds,
) -> TunePlan:
    """The time is a guess from the target's size and a product of matrices timed here."""
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    one, more = clock(1), clock(_PROBE_ROWS)
    scale = _OVERHEAD * size / (_PROBE_SIZE**2 * 2)
    slope = max(more - one, 0.0) / (_PROBE_ROWS - 1)

    def step_seconds(tokens: int) -> float:
        return scale * (one + slope * (tokens - 1))

    seconds = 2 * _ENGINE_START_SECONDS
    for each in rounds:
        steps = TOKENS * _STEPS_OF_A_TOKEN if each.k else TOKENS / 2
        bare = step_seconds(each.batch) * BARE_STEPS / DRAFTING_STEPS
        seconds += steps * (bare + step_seconds(each.batch * (each.k + 1)))
    return TunePlan(
        batch_sizes=sorted({each.batch for each in rounds}),
        draft_counts=sorted({each.k for each in rounds}),
        rounds=len(rounds),
        prompts=prompts,
        minutes=seconds / 60,
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
