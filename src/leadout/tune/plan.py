"""Which rounds a tuning measures, and an estimate of how long they take."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, repeat
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from leadout.control.policy import ladder_up_to
from leadout.engine.calibration import BARE_STEPS, DRAFTING_STEPS, RoundRequest
from leadout.engine.server_turns import Turns, weight_bytes
from leadout.engine.step_records import DRAFTING_IN_A_ROW

TOKENS = 40  # of each request and K
SHORT_TOKENS = 16  # the same with --short
# Small batches are measured twice: they have few requests and short rounds.
TWICE_UP_TO = 4
# With fewer requests acceptance is too uncertain; the largest batch is repeated to reach this.
MIN_REQUESTS = 20  # with each K
SPARSE_DRAFTS = (0, 1, 2, 3, 5, 7, 11)
ALL_DRAFTS_UP_TO = 5
SERVERS = 2
START_SECONDS = 40.0  # of a server
_OVERHEAD = 1.6  # a step is longer than its matrix products: attention, Python
_PROBE_SIZE, _PROBE_ROWS = 4096, 64
BFLOAT16 = "bfloat16"
Clock = Callable[[int, str], float]  # seconds of a product of so many rows in a torch dtype


def batch_sizes(max_batch: int) -> list[int]:
    """Powers of two up to the largest, and the largest."""
    powers = [2**power for power in range(max_batch.bit_length())]
    return sorted({*powers, max_batch})


def draft_counts(max_k: int, has_graphs: bool) -> list[int]:
    """Every K of a short block; in a long block fewer large ones, which differ little.

    With full CUDA graphs those of the ladder, since the server has graphs for no others.
    """
    if has_graphs:
        return [*ladder_up_to(max_k)]
    if max_k <= ALL_DRAFTS_UP_TO:
        return list(range(max_k + 1))
    return [*(k for k in SPARSE_DRAFTS if k < max_k), max_k]


def make_rounds(max_batch: int, drafts: Sequence[int], prompts: int) -> list[RoundRequest]:
    """Every K of `drafts` at every batch size; a batch answers the same prompts with each K."""
    shuffled = random.Random(0)
    numbers = shuffled.sample(range(prompts), prompts)
    next_prompt = cycle(numbers)
    rounds = []
    for batch in _batches(max_batch):
        chosen = list(islice(next_prompt, batch))
        counts = list(drafts)
        shuffled.shuffle(counts)
        rounds += [RoundRequest(batch=batch, k=k, prompts=chosen) for k in counts]
    return rounds


def short_rounds(rounds: Sequence[RoundRequest]) -> list[RoundRequest]:
    """Of all rounds, one each of three batch sizes and four K; costs between them are linear."""
    sizes = sorted({each.batch for each in rounds})
    drafts = sorted({each.k for each in rounds})
    batches = {sizes[0], sizes[len(sizes) // 2], sizes[-1]}
    counts = {*drafts[:2], drafts[len(drafts) // 2], drafts[-1]}
    kept: dict[tuple[int, int], RoundRequest] = {}
    for each in rounds:
        if each.batch in batches and each.k in counts:
            kept.setdefault((each.batch, each.k), each)
    return list(kept.values())


def _batches(max_batch: int) -> list[int]:
    """In the order of measurement; some sizes come more than once."""
    sizes = batch_sizes(max_batch)
    batches = [*sizes, *(size for size in sizes if size <= TWICE_UP_TO)]
    missing = MIN_REQUESTS - sum(batches)
    return [*batches, *repeat(max_batch, math.ceil(max(missing, 0) / max_batch))]


_ORDER: dict[Turns, str] = {
    "slices": "a few steps of one and a few of the other",
    "waves": "a round of one and then of the other",
    "single": "one after the other, because memory does not hold both",
}


class TunePlan(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_sizes: list[int]
    draft_counts: list[int]
    rounds: int
    prompts: int
    turns: Turns
    server_starts: int
    minutes: float
    tokens: int = TOKENS

    def text(self) -> str:
        return (
            f"{self.rounds} rounds: batch sizes {_listed(self.batch_sizes)} with K = "
            f"{_listed(self.draft_counts)}; {self.prompts} prompts, {self.tokens} tokens each\n"
            f"two servers, {_ORDER[self.turns]}\n"
            f"up to about {max(self.minutes, 1):.0f} minutes on an idle machine, including the "
            f"start of {self.server_starts} servers"
        )


@dataclass(frozen=True, slots=True)
class ProductTimes:
    """Matrix products timed on this machine, from which the time of a model's pass is estimated."""

    one: float  # seconds for one token
    per_token: float  # for each further one

    @classmethod
    def measured(cls, precision: str = BFLOAT16, clock: Clock | None = None) -> Self:
        """In the type that will be served: some processors have instructions for one type only."""
        clock = clock or product_seconds
        one, many = clock(1, precision), clock(_PROBE_ROWS, precision)
        return cls(one, max(many - one, 0.0) / (_PROBE_ROWS - 1))

    @classmethod
    def of_passes(cls, model_bytes: float, one: float, many: float, tokens: int) -> Self:
        """From measured passes of a model of this size, over one token and over `tokens`."""
        scale = _scale(model_bytes)
        return cls(one / scale, max(many - one, 0.0) / max(tokens - 1, 1) / scale)

    def divided_among(self, devices: int) -> Self:
        """Of an engine that divides every pass; what the devices tell each other is not counted."""
        return type(self)(self.one / devices, self.per_token / devices)

    def forward_seconds(self, model_bytes: float, tokens: int) -> float:
        """One pass of a model over so many tokens."""
        return _scale(model_bytes) * (self.one + self.per_token * (tokens - 1))


def _scale(model_bytes: float) -> float:
    """Passes of a model in products of the timed matrix."""
    return _OVERHEAD * model_bytes / (_PROBE_SIZE**2 * 2)


def make_plan(
    target: Path,
    drafter: Path,
    rounds: Sequence[RoundRequest],
    prompt_lengths: Sequence[int],
    turns: Turns,
    precision: str = BFLOAT16,
    tokens: int = TOKENS,
    clock: Clock | None = None,
) -> TunePlan:
    """An estimate from the sizes of both models and a matrix product timed on this machine."""
    times = ProductTimes.measured(precision, clock)
    sizes = weight_bytes(target), weight_bytes(drafter)
    return TunePlan(
        batch_sizes=sorted({each.batch for each in rounds}),
        draft_counts=sorted({each.k for each in rounds}),
        rounds=len(rounds),
        prompts=len(prompt_lengths),
        turns=turns,
        server_starts=SERVERS,
        minutes=measuring_seconds(times, *sizes, rounds, prompt_lengths, tokens) / 60,
        tokens=tokens,
    )


def measuring_seconds(
    times: ProductTimes,
    target_bytes: float,
    drafter_bytes: float,
    rounds: Sequence[RoundRequest],
    prompt_lengths: Sequence[int],
    tokens: int = TOKENS,
) -> float:
    """How long the rounds take, with the start of both servers.

    It assumes that no draft is accepted, so that a good drafter takes less time.
    """

    def round_seconds(each: RoundRequest, turns: int) -> float:
        prompts = sum(prompt_lengths[number] for number in each.prompts)
        prefill = 2 * times.forward_seconds(target_bytes, prompts)
        verified = each.batch * (each.k + 1)
        drafting = times.forward_seconds(target_bytes, verified)
        drafting += times.forward_seconds(drafter_bytes, verified) if each.k else 0.0
        bare = times.forward_seconds(target_bytes, each.batch)
        # In slices the first step of a turn is not timed.
        return prefill + turns * ((BARE_STEPS + 1) * bare + (DRAFTING_STEPS + 1) * drafting)

    widest = max(rounds, key=lambda each: (each.batch, each.k))
    seconds = SERVERS * START_SECONDS + round_seconds(widest, turns=1)  # which warms up
    return seconds + sum(round_seconds(each, _turns(each.k, tokens)) for each in rounds)


def _turns(k: int, tokens: int) -> int:
    """Turns of both servers until every request has its tokens, one in each step that counts."""
    if k == 0:
        return math.ceil(tokens / 2 / (DRAFTING_STEPS + 1))
    steps = tokens * (DRAFTING_IN_A_ROW + 1) / DRAFTING_IN_A_ROW
    return math.ceil(steps / (DRAFTING_STEPS + 1))


def product_seconds(rows: int, precision: str = BFLOAT16) -> float:
    """The fastest of three products of `rows` tokens with one matrix, on vLLM's device."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: torch.dtype = getattr(torch, precision)
    matrix = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype, device=device)
    tokens = torch.ones(rows, _PROBE_SIZE, dtype=dtype, device=device)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        (tokens @ matrix.T).sum().item()  # waits for the device
        times.append(time.perf_counter() - started)
    return min(times)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
