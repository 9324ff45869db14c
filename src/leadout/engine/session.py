"""One start of the engine, and all that is wanted of it: answers, counters, recorded drafts.

The process reads a request from its standard input and writes the result as its last line:

    python -m leadout.engine.session < request.json
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from leadout.engine.apart import Report, run_apart, say_progress, say_result
from leadout.engine.generate import Ask, TextEngine
from leadout.engine.recorded import RecordedText, write_texts
from leadout.engine.recorder import DraftRecorder

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
