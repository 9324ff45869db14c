"""Text through vLLM in one continuous queue: requests go in at any time, answers come out.

The engine lives in this process, so that it dies with it. A request's random numbers come from its
own seed: its answer does not depend on what else is under way (up to the rounding of the batch).
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from leadout.engine.child_process import Report, run_apart, say_progress, say_result
from leadout.engine.draft_recorder import DraftRecorder, RecordedText, write_texts
from leadout.engine.settings import SCHEDULER
from leadout.errors import LeadoutError


class EngineStartError(LeadoutError):
    """vLLM refuses the target or a setting."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, in token ids; temperature 0 is greedy."""

    id: str
    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: Sequence[int] = ()  # besides the target's own
    ignores_end: bool = False  # write on to max_tokens, whatever the target says


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request; `tokens` ends with the stop token where there was one."""

    id: str
    tokens: list[int]
    finish: Literal["stop", "length"]


class TextEngine:
    """vLLM with a target and, if one is given, with a drafter that guesses K tokens before it."""

    def __init__(
        self,
        target: str,
        *,
        max_length: int,
        max_requests: int,
        dtype: str = "auto",
        seed: int = 0,
        drafter: str | None = None,
        draft_tokens: int = 0,  # K
        eager: bool = False,
        **settings: Any,  # more of vLLM's
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        # Only read on CPUs, where vLLM's own guess is most of the machine's memory.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        from vllm import LLM
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        if on_cpu and drafter is not None:
            settings.setdefault("scheduler_cls", SCHEDULER)  # else sampled text may be wrong
        if on_cpu and settings.get("max_num_batched_tokens", max_length) >= max_length:
            # vLLM 0.32 winds a seeded request's random numbers back after each part of a prompt
            # but the last, which a CPU's generator refuses: the engine would die of it.
            settings.setdefault("enable_chunked_prefill", False)
        try:
            self._llm = LLM(
                model=target,
                dtype=dtype,
                max_model_len=max_length,
                max_num_seqs=max_requests,
                seed=seed,
                # Compilation takes minutes on a CPU; there vLLM's own kernels serve better.
                enforce_eager=on_cpu or eager,
                compilation_config={"custom_ops": ["all"]} if on_cpu else None,
                speculative_config=_speculation(drafter, draft_tokens),
                disable_log_stats=drafter is None,
                **settings,
            )
        except ValueError as problem:
            reason = " ".join(str(problem).split()).partition(" [type=")[0]
            raise EngineStartError(
                f"{target}: vLLM does not start: {reason} (asked for at most {max_length} tokens "
                f"in {dtype})"
            ) from problem
        # See `sound_drafts`: on a CPU nothing is drafted beside a sampled request.
        self.drafts_for_sampled = not on_cpu
        self._running = 0
        self._has_counters = drafter is not None

    @property
    def running(self) -> int:
        """Requests that have gone in and not come out."""
        return self._running

    def submit(self, ask: Ask) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._llm.llm_engine.add_request(
            ask.id,
            tokens_input(list(ask.prompt)),
            SamplingParams(
                temperature=ask.temperature,
                top_p=ask.top_p,
                seed=ask.seed if ask.temperature > 0 else None,
                max_tokens=ask.max_tokens,
                stop_token_ids=list(ask.stop_tokens) or None,
                ignore_eos=ask.ignores_end,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )
        self._running += 1

    def step(self) -> list[Answer]:
        """One step of the engine; the answers that it finished."""
        finished = [output for output in self._llm.llm_engine.step() if output.finished]
        self._running -= len(finished)
        return [
            Answer(
                output.request_id,
                list(output.outputs[0].token_ids),
                "stop" if output.outputs[0].finish_reason == "stop" else "length",
            )
            for output in finished
        ]

    def answer_all(self, asks: Sequence[Ask]) -> list[Answer]:
        """Every answer, in the order of the requests."""
        for ask in asks:
            self.submit(ask)
        answers: dict[str, Answer] = {}
        while self.running:
            answers |= {answer.id: answer for answer in self.step()}
        return [answers[ask.id] for ask in asks]

    def draft_model(self) -> Any:
        """The drafter as vLLM runs it: a module of its own, in this process."""
        (model,) = self._llm.collective_rpc(_draft_model)
        return model

    def forget_prompts(self) -> None:
        """Compute the next prompts whole, whatever is known of their beginnings."""
        self._llm.reset_prefix_cache()

    def counters(self) -> dict[str, Any]:
        """vLLM's counters of speculation so far, if there is one; those by position are lists."""
        if not self._has_counters:
            return {}
        found = {m.name: m for m in self._llm.get_metrics() if "spec_decode" in m.name}
        return {
            name: getattr(m, "values", None) or getattr(m, "value", 0) for name, m in found.items()
        }


def _draft_model(worker: Any) -> Any:
    return worker.get_draft_model()


def _speculation(drafter: str | None, draft_tokens: int) -> dict[str, Any] | None:
    if drafter is None:
        return None
    return {"method": "dflash", "model": drafter, "num_speculative_tokens": draft_tokens}


# One start of the engine, and all that is wanted of it: answers, counters, recorded drafts.
#
# The process reads a request from its standard input and writes the result as its last line:
#
#     python -m leadout.engine.offline < request.json

# Requests at a time.
CONCURRENCY = 16


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Recording(_Message):
    """Which prompts to record the drafter's tensors for, one at a time, and where to."""

    prompts: list[list[int]]
    blocks: int  # of each prompt
    path: Path


class SessionRequest(_Message):
    target: str
    drafter: str | None = None
    draft_tokens: int = 0  # K
    prompts: dict[str, list[list[int]]]  # by set
    # Every prompt once at each; with a drafter on a CPU only greedily.
    temperatures: list[float] = [0.0]
    max_tokens: int
    max_length: int
    dtype: str = "auto"
    recording: Recording | None = None


class SetRun(_Message):
    """One prompt set at one temperature, by vLLM's counters."""

    prompt_set: str
    temperature: float
    answers: list[list[int]]
    steps: int
    accepted_by_position: list[int]

    @property
    def acceptance_length(self) -> float:
        return 1 + sum(self.accepted_by_position) / max(self.steps, 1)


class SessionResult(_Message):
    runs: list[SetRun]


def run(request: SessionRequest) -> SessionResult:
    """In this process; one engine a process, for the counters are the process's."""
    engine = TextEngine(
        request.target,
        max_length=request.max_length,
        max_requests=CONCURRENCY,
        dtype=request.dtype,
        drafter=request.drafter,
        draft_tokens=request.draft_tokens,
        eager=True,  # the recorder hears nothing of a captured graph
    )
    say_progress("vLLM has started")
    if request.recording is not None:
        asked = request.recording
        write_texts(_record(engine, asked, request.draft_tokens), asked.path)
        say_progress(f"recorded drafts of {len(asked.prompts)} prompts")
    runs = []
    temperatures = request.temperatures
    if request.drafter is not None and not engine.drafts_for_sampled:
        temperatures = [each for each in temperatures if each == 0]
    for temperature in temperatures:
        number = itertools.count()  # every prompt has its own, whatever its set
        for name, prompts in request.prompts.items():
            asks = [
                _ask(next(number), prompt, temperature, request.max_tokens) for prompt in prompts
            ]
            runs.append(_run_set(engine, name, temperature, asks))
            say_progress(f"{name} at temperature {temperature:g}")
    return SessionResult(runs=runs)


def run_session_apart(request: SessionRequest, report: Report = lambda _: None) -> SessionResult:
    """In a process of its own."""
    return run_apart(__spec__.name, request, SessionResult, report)


def _ask(number: int, prompt: Sequence[int], temperature: float, max_tokens: int) -> Ask:
    return Ask(f"{temperature:g}/{number}", prompt, max_tokens, temperature, seed=number)


def _run_set(engine: TextEngine, name: str, temperature: float, asks: Sequence[Ask]) -> SetRun:
    before = _Counts(engine)
    answers = engine.answer_all(asks)
    after = _Counts(engine)
    return SetRun(
        prompt_set=name,
        temperature=temperature,
        answers=[answer.tokens for answer in answers],
        steps=after.steps - before.steps,
        accepted_by_position=[
            new - old for new, old in zip(after.by_position, before.by_position, strict=True)
        ],
    )


class _Counts:
    def __init__(self, engine: TextEngine) -> None:
        counters = engine.counters()
        self.steps: int = counters.get("vllm:spec_decode_num_drafts", 0)
        by_position = counters.get("vllm:spec_decode_num_accepted_tokens_per_pos", [])
        self.by_position: list[int] = list(by_position)


def _record(engine: TextEngine, asked: Recording, draft_tokens: int) -> list[RecordedText]:
    recorder = DraftRecorder(asked.blocks)
    # Enough for so many blocks even if every draft stands.
    max_tokens = asked.blocks * (draft_tokens + 1) + 1
    texts = []
    with recorder.listening(engine.draft_model()):
        for number, prompt in enumerate(asked.prompts):
            engine.forget_prompts()
            (answer,) = engine.answer_all([Ask(f"recorded/{number}", prompt, max_tokens)])
            texts.append(recorder.take([*prompt, *answer.tokens]))
    return texts


if __name__ == "__main__":
    wanted = SessionRequest.model_validate_json(sys.stdin.read())
    say_result(run(wanted))
