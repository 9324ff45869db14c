"""Measures step times with and without drafts, and how many tokens the drafts gain.

Two engines, one without and one with the drafter, complete the same prompts in one child process.
A round is one batch size and one K: a few steps of one engine, a few of the other, and so on, so
that anything that slows the machine slows both. K is constant within a round, because tokens per
step depend on the positions at which steps begin, and those depend on K. Only every fifth step
drafts nothing, which separates the cost of verifying from that of drafting.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain, cycle, repeat
from typing import Any, Literal

from leadout.engine.child_process import Message, Report, answer_requests, run_module
from leadout.engine.offline import TextEngine, TextRequest
from leadout.engine.vllm_adapter import model_runner

# Steps per turn; the first one is not timed, as the caches are full of the other engine's data.
BARE_STEPS, DRAFTING_STEPS = 4, 7
DRAFTING_IN_A_ROW = 4
# Of the GPU's memory, for each engine: both hold the target.
GPU_SHARE = 0.45
MIN_BATCHED_TOKENS = 2048


class RoundRequest(Message):
    batch: int
    k: int
    prompts: list[int]  # indices, as many as `batch`


class CalibrationRequest(Message):
    target: str
    drafter: str
    draft_tokens: int  # the largest K
    prompts: list[list[int]]
    rounds: list[RoundRequest]
    tokens: int  # every request generates so many in steps that verify K drafts
    max_length: int
    dtype: str = "auto"

    @property
    def max_batch(self) -> int:
        return max(each.batch for each in self.rounds)


class StepTime(Message):
    verified: int  # drafts per request
    drafted: int  # per request
    seconds: float


class Turn(Message):
    """Steps of both engines within a second or so of each other."""

    bare: list[float]  # seconds
    steps: list[StepTime]


class Gained(Message):
    """Tokens that one request gained in each step that verified K drafts."""

    prompt: int
    tokens: list[int]


class Prefill(Message):
    """A step that only processed prompts."""

    tokens: int
    seconds: float


class RoundResult(Message):
    batch: int
    k: int
    turns: list[Turn]
    gained: list[Gained]
    prefill_bare: list[Prefill]
    prefill_drafting: list[Prefill]


class CalibrationResult(Message):
    runner: Literal["V1", "V2"]
    dtype: str
    rounds: list[RoundResult]


class TimedEngine(TextEngine):
    """An engine whose scheduler records what each step did."""

    def __init__(self, request: CalibrationRequest, drafter: str | None) -> None:
        from leadout.engine.scheduler import CALIBRATION_SCHEDULER
        from leadout.pairing.rules import batched_tokens_for

        needed = batched_tokens_for(request.max_batch, request.draft_tokens)
        super().__init__(
            request.target,
            max_length=request.max_length,
            max_requests=request.max_batch,
            dtype=request.dtype,
            drafter=drafter,
            draft_tokens=request.draft_tokens,
            scheduler_cls=CALIBRATION_SCHEDULER,
            async_scheduling=False,
            enable_prefix_caching=False,
            max_num_batched_tokens=max(needed, MIN_BATCHED_TOKENS),
            gpu_memory_utilization=GPU_SHARE,
        )
        self._ids: list[str] = []

    @property
    def scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def timed_step(self) -> tuple[float, Any]:
        """Seconds of one step, and the scheduler's record of it."""
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began, self.scheduler.last_step

    def begin(self, prompts: Sequence[tuple[int, Sequence[int]]], max_tokens: int) -> list[Prefill]:
        """Submit numbered prompts and step until all of them decode."""
        self._ids = [f"{place}_{number}" for place, (number, _) in enumerate(prompts)]
        for name, (_, prompt) in zip(self._ids, prompts, strict=True):
            self.submit(TextRequest(name, prompt, max_tokens, ignore_eos=True))
        prefills = []
        while True:
            seconds, record = self.timed_step()
            if record.prompt_tokens and not record.verified:
                prefills.append(Prefill(tokens=record.prompt_tokens, seconds=seconds))
            if not record.prompt_tokens:
                return prefills

    def abort(self) -> None:
        """Abort the requests that `begin` submitted."""
        self._llm.llm_engine.abort_request(self._ids)
        self.running = 0


def calibrate(request: CalibrationRequest, report: Report) -> CalibrationResult:
    """Run the calibration in a child process."""
    return run_module(__spec__.name, request, CalibrationResult, report)


def _calibrate_here(request: CalibrationRequest, report: Report) -> CalibrationResult:
    bare = TimedEngine(request, drafter=None)
    report("vLLM has started without the drafter")
    drafting = TimedEngine(request, drafter=request.drafter)
    report("vLLM has started with the drafter")
    largest = max(request.rounds, key=lambda each: (each.batch, each.k))
    _Round(bare, drafting, request, largest).run(max_turns=1)  # warm-up
    results = []
    for each in request.rounds:
        results.append(_Round(bare, drafting, request, each).run())
        report(f"batch size {each.batch}, K = {each.k}")
    config = drafting.scheduler.vllm_config
    return CalibrationResult(
        runner=model_runner(config),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        rounds=results,
    )


def draft_lengths(k: int) -> Iterator[int]:
    """Drafts of each step: four steps with `k`, then one with none."""
    return cycle([*repeat(k, DRAFTING_IN_A_ROW), 0])


class _Round:
    def __init__(
        self,
        bare: TimedEngine,
        drafting: TimedEngine,
        request: CalibrationRequest,
        settings: RoundRequest,
    ) -> None:
        self._bare, self._drafting, self._settings = bare, drafting, settings
        self._prompts = [(number, request.prompts[number]) for number in settings.prompts]
        # Without drafts all steps are alike and there is no acceptance to measure.
        self._tokens = request.tokens if settings.k else request.tokens // 2
        longest = max(len(prompt) for _, prompt in self._prompts)
        enough = (request.tokens + 2 * DRAFTING_STEPS) * (request.draft_tokens + 1)
        self._max_tokens = min(enough, request.max_length - longest)
        self._gained: dict[str, list[int]] = {}

    def run(self, max_turns: int | None = None) -> RoundResult:
        self._drafting.scheduler.drafts = draft_lengths(self._settings.k)
        prefill_bare = self._bare.begin(self._prompts, self._max_tokens)
        prefill_drafting = self._drafting.begin(self._prompts, self._max_tokens)
        turns: list[Turn] = []
        while not self._is_over() and len(turns) != max_turns:
            turns.append(self._turn())
        self._bare.abort()
        self._drafting.abort()
        return RoundResult(
            batch=self._settings.batch,
            k=self._settings.k,
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
        """The seconds of a step, if the batch was full."""
        if self._bare.running < self._settings.batch:
            return []
        seconds, record = self._bare.timed_step()
        return [seconds] if len(record.verified) == self._settings.batch else []

    def _drafting_step(self) -> list[StepTime]:
        if self._drafting.running < self._settings.batch:
            return []
        seconds, record = self._drafting.timed_step()
        for name, verified in record.verified.items():
            tokens = self._gained.setdefault(name, [])
            if verified == self._settings.k and sum(tokens) < self._tokens:
                tokens.append(record.tokens[name])
        lengths = set(record.verified.values())
        if len(record.verified) != self._settings.batch or len(lengths) != 1:
            return []
        return [StepTime(verified=lengths.pop(), drafted=record.drafted, seconds=seconds)]

    def _is_over(self) -> bool:
        """Every request has its tokens, or one has reached the maximum length."""
        if self._drafting.running < self._settings.batch:
            return True
        gained = [sum(tokens) for tokens in self._gained.values()]
        return len(gained) == self._settings.batch and min(gained) >= self._tokens


if __name__ == "__main__":
    answer_requests(CalibrationRequest, _calibrate_here)
