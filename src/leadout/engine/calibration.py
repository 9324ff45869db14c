"""Times of bare steps and of steps with drafts, taken in turns, and what the drafts gain.

Both engines answer the same prompts. A round is one batch size and one K: a few steps of the bare
engine, a few of the drafting one, and so on, so that whatever slows the machine slows both. K stays
the same for a round: tokens per step depend on which positions the steps begin at, and those on K.
Only every fifth step drafts nothing, which tells the cost of verifying from that of drafting.

    python -m leadout.engine.calibration < request.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain, cycle, repeat
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from leadout.engine.child_process import Report, run_apart, say_progress, say_result
from leadout.engine.offline import Ask, TextEngine

# Of a turn; the first step after the other engine's is not timed, as caches are the other's.
BARE_STEPS, DRAFTING_STEPS = 4, 7
DRAFTING_IN_A_ROW = 4
# Each engine's share of a GPU: both hold the target.
GPU_SHARE = 0.45
LEAST_BATCHED_TOKENS = 2048


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RoundRequest(_Message):
    batch: int
    k: int
    prompts: list[int]  # which ones, as many as `batch`


class CalibrationRequest(_Message):
    target: str
    drafter: str
    draft_tokens: int  # the largest K
    prompts: list[list[int]]
    rounds: list[RoundRequest]
    tokens: int  # that every request gains in steps that verify K drafts
    max_length: int
    dtype: str = "auto"

    @property
    def max_batch(self) -> int:
        return max(each.batch for each in self.rounds)


class StepTime(_Message):
    verified: int  # drafts of each request
    drafted: int
    seconds: float


class Turn(_Message):
    """Steps of both engines within a second or so of each other."""

    bare: list[float]  # seconds
    steps: list[StepTime]


class Gained(_Message):
    """Tokens of one request in each step that verified K drafts."""

    prompt: int
    tokens: list[int]


class Prefill(_Message):
    """A step that did nothing but read prompts."""

    tokens: int
    seconds: float


class RoundResult(_Message):
    batch: int
    k: int
    turns: list[Turn]
    gained: list[Gained]
    prefill_bare: list[Prefill]
    prefill_drafting: list[Prefill]


class CalibrationResult(_Message):
    runner: Literal["V1", "V2"]
    dtype: str
    rounds: list[RoundResult]


class TimedEngine(TextEngine):
    """An engine whose scheduler notes what each step did."""

    def __init__(self, request: CalibrationRequest, drafter: str | None) -> None:
        from leadout.engine.scheduler import NAME
        from leadout.pairing.rules import batched_tokens_for

        needed = batched_tokens_for(request.max_batch, request.draft_tokens)
        super().__init__(
            request.target,
            max_length=request.max_length,
            max_requests=request.max_batch,
            dtype=request.dtype,
            drafter=drafter,
            draft_tokens=request.draft_tokens,
            scheduler_cls=NAME,
            async_scheduling=False,
            enable_prefix_caching=False,
            max_num_batched_tokens=max(needed, LEAST_BATCHED_TOKENS),
            gpu_memory_utilization=GPU_SHARE,
        )
        self._ids: list[str] = []

    @property
    def scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def config(self) -> Any:
        return self._llm.llm_engine.vllm_config

    def timed_step(self) -> tuple[float, Any]:
        """One whole step, and its note."""
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began, self.scheduler.note

    def begin(self, prompts: Sequence[tuple[int, Sequence[int]]], room: int) -> list[Prefill]:
        """Submit requests named by their numbers, and step until all of them decode."""
        self._ids = [f"{place}_{number}" for place, (number, _) in enumerate(prompts)]
        for name, (_, prompt) in zip(self._ids, prompts, strict=True):
            self.submit(Ask(name, prompt, room, ignores_end=True))
        read = []
        while True:
            seconds, note = self.timed_step()
            if note.prompt_tokens and not note.verified:
                read.append(Prefill(tokens=note.prompt_tokens, seconds=seconds))
            if not note.prompt_tokens:
                return read

    def withdraw(self) -> None:
        """Give up the requests that `begin` submitted."""
        self._llm.llm_engine.abort_request(self._ids)
        self._running = 0


def calibrate(request: CalibrationRequest) -> CalibrationResult:
    bare = TimedEngine(request, drafter=None)
    say_progress("vLLM has started without the drafter")
    drafting = TimedEngine(request, drafter=request.drafter)
    say_progress("vLLM has started with the drafter")
    widest = max(request.rounds, key=lambda each: (each.batch, each.k))
    _Round(bare, drafting, request, widest).run(most_turns=1)  # warms up
    results = []
    for each in request.rounds:
        results.append(_Round(bare, drafting, request, each).run())
        say_progress(f"batch size {each.batch}, K = {each.k}")
    config = drafting.config
    return CalibrationResult(
        runner="V2" if config.use_v2_model_runner else "V1",
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        rounds=results,
    )


def calibrate_apart(request: CalibrationRequest, report: Report) -> CalibrationResult:
    """In a process of its own."""
    return run_apart(__spec__.name, request, CalibrationResult, report)


def draft_lengths(k: int) -> Iterator[int]:
    """K for the next step, mostly `k`."""
    return cycle([*repeat(k, DRAFTING_IN_A_ROW), 0])


class _Round:
    def __init__(
        self,
        bare: TimedEngine,
        drafting: TimedEngine,
        request: CalibrationRequest,
        asked: RoundRequest,
    ) -> None:
        self._bare, self._drafting = bare, drafting
        self._asked = asked
        self._prompts = [(number, request.prompts[number]) for number in asked.prompts]
        # Where nothing is drafted every step is alike, and nothing is to be learnt of acceptance.
        self._wanted = request.tokens if asked.k else request.tokens // 2
        longest = max(len(prompt) for _, prompt in self._prompts)
        whole = (request.tokens + 2 * DRAFTING_STEPS) * (request.draft_tokens + 1)
        self._room = min(whole, request.max_length - longest)
        self._gained: dict[str, list[int]] = {}

    def run(self, most_turns: int | None = None) -> RoundResult:
        self._drafting.scheduler.drafts = draft_lengths(self._asked.k)
        prefill_bare = self._bare.begin(self._prompts, self._room)
        prefill_drafting = self._drafting.begin(self._prompts, self._room)
        turns: list[Turn] = []
        while not self._is_over() and len(turns) != most_turns:
            turns.append(self._turn())
        self._bare.withdraw()
        self._drafting.withdraw()
        return RoundResult(
            batch=self._asked.batch,
            k=self._asked.k,
            turns=turns,
            gained=[
                Gained(prompt=int(name.partition("-")[0].partition("_")[2]), tokens=tokens)
                for name, tokens in self._gained.items()
            ],
            prefill_bare=prefill_bare,
            prefill_drafting=prefill_drafting,
        )

    def _turn(self) -> Turn:
        bare = list(chain.from_iterable(self._bare_step() for _ in range(BARE_STEPS)))
        steps = list(chain.from_iterable(self._drafting_step() for _ in range(DRAFTING_STEPS)))
        return Turn(bare=bare[1:], steps=steps[1:])

    def _bare_step(self) -> list[float]:
        """Seconds, if the batch was full."""
        if self._bare.running < self._asked.batch:
            return []
        seconds, note = self._bare.timed_step()
        return [seconds] if len(note.verified) == self._asked.batch else []

    def _drafting_step(self) -> list[StepTime]:
        if self._drafting.running < self._asked.batch:
            return []
        seconds, note = self._drafting.timed_step()
        for name, verified in note.verified.items():
            tokens = self._gained.setdefault(name, [])
            if verified == self._asked.k and sum(tokens) < self._wanted:
                tokens.append(note.tokens[name])
        lengths = set(note.verified.values())
        if len(note.verified) != self._asked.batch or len(lengths) != 1:
            return []
        return [StepTime(verified=lengths.pop(), drafted=note.drafted, seconds=seconds)]

    def _is_over(self) -> bool:
        """Every request has gained its tokens, or one has no room for more."""
        if self._drafting.running < self._asked.batch:
            return True
        gained = [sum(tokens) for tokens in self._gained.values()]
        return len(gained) == self._asked.batch and min(gained) >= self._wanted


if __name__ == "__main__":
    wanted = CalibrationRequest.model_validate_json(sys.stdin.read())
    say_result(calibrate(wanted))
