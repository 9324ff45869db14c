"""Which rounds a tuning measures, and an estimate of how long they take."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice, repeat
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from leadout.engine.calibration import (
    BARE_STEPS,
    DRAFTING_IN_A_ROW,
    DRAFTING_STEPS,
    RoundRequest,
)

TOKENS = 40  # of each request and K
# Small batches are measured twice: they have few requests and short rounds.
TWICE_UP_TO = 4
# With fewer requests acceptance is too uncertain; the largest batch is repeated to reach this.
MIN_REQUESTS = 20  # with each K
SPARSE_DRAFTS = (0, 1, 2, 3, 5, 7, 11)
ALL_DRAFTS_UP_TO = 5
_START_SECONDS = 80.0  # of a process with two engines
_OVERHEAD = 1.6  # a step is longer than its matrix products: attention, Python
_PROBE_SIZE, _PROBE_ROWS = 4096, 64


def batch_sizes(max_batch: int) -> list[int]:
    """Powers of two up to the largest, and the largest."""
    powers = [2**power for power in range(max_batch.bit_length())]
    return sorted({*powers, max_batch})


def draft_counts(max_k: int) -> list[int]:
    """Every K of a short block; in a long block fewer large ones, which differ little."""
    if max_k <= ALL_DRAFTS_UP_TO:
        return list(range(max_k + 1))
    return [*(k for k in SPARSE_DRAFTS if k < max_k), max_k]


def make_rounds(max_batch: int, max_k: int, prompts: int) -> list[RoundRequest]:
    """Every K at every batch size; a batch answers the same prompts with each K."""
    shuffled = random.Random(0)
    numbers = shuffled.sample(range(prompts), prompts)
    next_prompt = cycle(numbers)
    rounds = []
    for batch in _batches(max_batch):
        chosen = list(islice(next_prompt, batch))
        counts = draft_counts(max_k)
        shuffled.shuffle(counts)
        rounds += [RoundRequest(batch=batch, k=k, prompts=chosen) for k in counts]
    return rounds


def _batches(max_batch: int) -> list[int]:
    """In the order of measurement; some sizes come more than once."""
    sizes = batch_sizes(max_batch)
    batches = [*sizes, *(size for size in sizes if size <= TWICE_UP_TO)]
    missing = MIN_REQUESTS - sum(batches)
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
            f"{self.rounds} rounds: batch sizes {_listed(self.batch_sizes)} with K = "
            f"{_listed(self.draft_counts)}; {self.prompts} prompts, {TOKENS} tokens each\n"
            f"up to about {max(self.minutes, 1):.0f} minutes on an idle machine, including the "
            "start of two engines"
        )


def make_plan(
    target: Path,
    drafter: Path,
    rounds: Sequence[RoundRequest],
    prompt_lengths: Sequence[int],
    clock: Callable[[int], float] | None = None,
) -> TunePlan:
    """An estimate from the sizes of both models and a matrix product timed on this machine.

    It assumes that no draft is accepted, so that a good drafter takes less time.
    """
    clock = clock or product_seconds
    one, many = clock(1), clock(_PROBE_ROWS)
    slope = max(many - one, 0.0) / (_PROBE_ROWS - 1)

    def forward_seconds(model_bytes: int, tokens: int) -> float:
        scale = _OVERHEAD * model_bytes / (_PROBE_SIZE**2 * 2)
        return scale * (one + slope * (tokens - 1))

    def round_seconds(each: RoundRequest, turns: int) -> float:
        prefill = 2 * forward_seconds(target_bytes, sum(prompt_lengths[n] for n in each.prompts))
        tokens = each.batch * (each.k + 1)
        drafting = forward_seconds(target_bytes, tokens)
        drafting += forward_seconds(drafter_bytes, tokens) if each.k else 0.0
        bare = forward_seconds(target_bytes, each.batch)
        return prefill + turns * (BARE_STEPS * bare + DRAFTING_STEPS * drafting)

    target_bytes, drafter_bytes = _weight_bytes(target), _weight_bytes(drafter)
    widest = max(rounds, key=lambda each: (each.batch, each.k))
    seconds = _START_SECONDS + round_seconds(widest, turns=1)  # which warms up
    seconds += sum(round_seconds(each, _turns(each.k)) for each in rounds)
    return TunePlan(
        batch_sizes=sorted({each.batch for each in rounds}),
        draft_counts=sorted({each.k for each in rounds}),
        rounds=len(rounds),
        prompts=len(prompt_lengths),
        minutes=seconds / 60,
    )


def _turns(k: int) -> int:
    """Turns of both engines until every request has its tokens, one in each step that counts."""
    if k == 0:
        return math.ceil(TOKENS / 2 / DRAFTING_STEPS)
    steps = TOKENS * (DRAFTING_IN_A_ROW + 1) / DRAFTING_IN_A_ROW
    return math.ceil(steps / DRAFTING_STEPS)


def product_seconds(rows: int) -> float:
    """The fastest of three products of `rows` tokens with one matrix, on vLLM's device."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=torch.bfloat16, device=device)
    tokens = torch.ones(rows, _PROBE_SIZE, dtype=torch.bfloat16, device=device)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        (tokens @ matrix.T).sum().item()  # waits for the device
        times.append(time.perf_counter() - started)
    return min(times)


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
