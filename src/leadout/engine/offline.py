"""Text generation with vLLM, without a server: in this process or in a child process.

`TextEngine` runs in this process: requests can be submitted at any time and completions come out
of `step`. Each request has its own random seed, so that its text does not depend on which other
requests run (up to the rounding of the batch).

`run_session` starts an engine in a child process, completes sets of prompts with it, and returns
the texts with vLLM's acceptance counters and, on request, the tensors of the drafter.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from leadout.dflash.target import UnsupportedTargetError
from leadout.engine.child_process import (
    EngineError,
    Message,
    Report,
    answer_requests,
    exact_environment,
    ignore_progress,
    run_module,
)
from leadout.engine.draft_recorder import DraftRecorder, RecordedText, write_texts
from leadout.engine.settings import SCHEDULER
from leadout.engine.vllm_flags import engine_arguments
from leadout.pairing.target import read_any_config

SESSION_CONCURRENCY = 16
CPU_STEP_TOKENS = 4096  # vLLM's own default of max_num_batched_tokens there
# What a session sets itself, as `engine_arguments` takes it.
_REMOVE = "remove the flag"
_NAME_DRAFTER = "name the drafter instead"
SESSION_SETTINGS = {
    "dtype": "use --dtype of the command, if it has one, or remove the flag",
    "max_model_len": _REMOVE,
    "max_num_seqs": _REMOVE,
    "seed": _REMOVE,
    "speculative_config": _NAME_DRAFTER,
    "spec_method": _NAME_DRAFTER,
    "spec_model": _NAME_DRAFTER,
    "spec_tokens": _NAME_DRAFTER,
}


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A prompt in token ids and how to continue it; temperature 0 is greedy."""

    id: str
    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: Sequence[int] = ()  # in addition to the target's own
    ignore_eos: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)  # by the names of SamplingParams


@dataclass(frozen=True, slots=True)
class Completion:
    """The text of a request; `tokens` ends with the stop token if there was one."""

    id: str
    tokens: list[int]
    finish: Literal["stop", "length"]
    by_step: list[int] = field(default_factory=list)  # tokens of each step, first the prompt's
    cached_tokens: int = 0  # of the prompt, that came from the prefix cache


class TextEngine:
    """vLLM with a target and optionally a drafter, in this process.

    With `tapped`, a target is refused whose hidden states no drafter could read. With `log`, what
    vLLM prints goes into that file instead of onto the terminal.
    """

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
        tapped: bool = False,
        log: Path | None = None,
        **settings: Any,  # passed to vLLM; they override what is chosen here
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        # Read on CPUs only, where vLLM's default is most of the machine's memory.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        with output_to_log(log):
            from vllm import LLM
            from vllm.platforms import current_platform

            if tapped and settings.get("model_impl") != "transformers":
                require_tappable(target)
            on_cpu = current_platform.is_cpu()
            if on_cpu and (drafter is not None or settings.get("speculative_config")):
                settings.setdefault("scheduler_cls", SCHEDULER)  # else sampled text may be wrong
            # In one step: without chunked prefill a prompt that does not fit would wait for ever.
            room = max_length + (0 if drafter is None else draft_tokens)
            if on_cpu and settings.get("max_num_batched_tokens", room) >= room:
                # vLLM 0.32 rewinds a seeded request's random generator after each chunk of a
                # prompt but the last. CPU generators do not support this: the engine would die.
                settings.setdefault("enable_chunked_prefill", False)
                if drafter is not None:  # vLLM's own default has no room for the drafts
                    default = min(CPU_STEP_TOKENS, max_requests * max_length)
                    settings.setdefault("max_num_batched_tokens", max(room, default))
            speculation = {
                "method": "dflash",
                "model": drafter,
                "num_speculative_tokens": draft_tokens,
            }
            arguments: dict[str, Any] = {
                "model": target,
                "dtype": dtype,
                "max_model_len": max_length,
                "max_num_seqs": max_requests,
                "seed": seed,
                # Compiling takes minutes on a CPU, where vLLM's own kernels are faster.
                "enforce_eager": on_cpu or eager,
                "compilation_config": {"custom_ops": ["all"]} if on_cpu else None,
                "speculative_config": None if drafter is None else speculation,
                "disable_log_stats": drafter is None,
            }
            try:
                self._llm = LLM(**arguments | settings)
            except ValueError as problem:
                reason = " ".join(str(problem).split()).partition(" [type=")[0]
                see_log = "" if log is None else f" (log: {log})"
                raise EngineError(
                    f"{target}: vLLM does not start with a maximum of {max_length} tokens in "
                    f"{dtype}: {reason}{see_log}"
                ) from problem
        # On a CPU, Leadout's scheduler drafts nothing while a sampled request runs.
        self.drafts_for_sampled = not on_cpu
        self.running = 0  # requests that were submitted and are not complete
        self._has_counters = drafter is not None
        self._written: dict[str, list[int]] = {}  # tokens of a running request after each step

    def submit(self, request: TextRequest) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._llm.llm_engine.add_request(
            request.id,
            tokens_input(list(request.prompt)),
            SamplingParams(
                temperature=request.temperature,
                top_p=request.top_p,
                seed=request.seed if request.temperature > 0 else None,
                max_tokens=request.max_tokens,
                stop_token_ids=list(request.stop_tokens) or None,
                ignore_eos=request.ignore_eos,
                detokenize=False,
                output_kind=RequestOutputKind.CUMULATIVE,
                **request.options,
            ),
        )
        self._written[request.id] = [0]
        self.running += 1

    def step(self) -> list[Completion]:
        """Run one step of the engine; returns the completions that it finished."""
        outputs = self._llm.llm_engine.step()
        for output in outputs:
            self._written[output.request_id].append(len(output.outputs[0].token_ids))
        finished = [output for output in outputs if output.finished]
        self.running -= len(finished)
        return [
            Completion(
                output.request_id,
                list(output.outputs[0].token_ids),
                "stop" if output.outputs[0].finish_reason == "stop" else "length",
                [
                    after - before
                    for before, after in pairwise(self._written.pop(output.request_id))
                ],
                output.num_cached_tokens or 0,
            )
            for output in finished
        ]

    def complete(self, requests: Sequence[TextRequest]) -> list[Completion]:
        """All completions, in the order of the requests."""
        for request in requests:
            self.submit(request)
        completions: dict[str, Completion] = {}
        while self.running:
            completions |= {each.id: each for each in self.step()}
        return [completions[request.id] for request in requests]

    def draft_model(self) -> Any:
        """The drafter's module as vLLM runs it in this process."""
        (model,) = self._llm.collective_rpc(_draft_model)
        return model

    def reset_prefix_cache(self) -> None:
        """Make vLLM compute the next prompts from their first token on."""
        self._llm.reset_prefix_cache()

    @property
    def cache_block(self) -> int:
        """The prefix cache holds whole blocks of this many tokens."""
        return int(self._llm.llm_engine.vllm_config.cache_config.block_size)

    def counters(self) -> dict[str, Any]:
        """vLLM's speculation counters so far; per-position counters are lists."""
        if not self._has_counters:
            return {}
        found = {m.name: m for m in self._llm.get_metrics() if "spec_decode" in m.name}
        return {
            name: getattr(m, "values", None) or getattr(m, "value", 0) for name, m in found.items()
        }


def require_tappable(target: str) -> None:
    """Refuse a target whose class in vLLM does not hand hidden states of its layers to a drafter.

    Architectures without a class of their own run through vLLM's transformers backend, which does.
    """
    from vllm import ModelRegistry

    from leadout.engine.vllm_adapter import supports_eagle3

    named = read_any_config(Path(target)).get("architectures")
    for name in named if isinstance(named, list) else []:
        known = ModelRegistry.models.get(name)
        if known is not None and not supports_eagle3(known.load_model_cls()):
            raise UnsupportedTargetError(
                f"{target} cannot be the target of a drafter: vLLM's {name} does not hand out the "
                "hidden states of its layers (it has no Eagle3 interface). vLLM's transformers "
                "backend does: add `-- --model-impl transformers` here and wherever the target is "
                "served, or use another target."
            )


@contextmanager
def output_to_log(log: Path | None) -> Iterator[None]:
    """Send all output of this process into a log, and vLLM's log lines also from then on.

    At the level of file descriptors: C++ libraries print during the start, too.
    """
    if log is None:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = [os.dup(descriptor) for descriptor in (1, 2)]
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    try:
        yield
        logger = logging.getLogger("vllm")
        handler = logging.FileHandler(log, encoding="utf-8")
        handler.setFormatter(next((each.formatter for each in logger.handlers), None))
        logger.handlers = [handler]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, original in enumerate(terminal, start=1):
            os.dup2(original, descriptor)
            os.close(original)


def _draft_model(worker: Any) -> Any:
    return worker.get_draft_model()


class Recording(Message):
    """Prompts for which to record the drafter's tensors, one prompt at a time, and the file."""

    prompts: list[list[int]]
    blocks: int  # per prompt
    path: Path


class Pass(Message):
    """One run of the prompts; with a drafter on a CPU only at temperature 0."""

    name: str = "greedy"
    temperature: float = 0.0
    batch: int | None = None  # requests at a time; None: as many as the engine runs
    sets: list[str] | None = None  # the prompt sets; None: all
    # Keep the prefix cache of the pass before. Sets without a prompt of a whole cache block are
    # left out.
    warm: bool = False


class SessionRequest(Message):
    target: str
    drafter: str | None = None
    draft_tokens: int = 0  # K
    prompts: dict[str, list[list[int]]]  # by prompt set
    passes: list[Pass] = Field(default=[Pass()])
    max_tokens: int
    max_length: int
    dtype: str = "auto"
    recording: Recording | None = None
    vllm_flags: list[str] = Field(default=[])  # as `vllm serve` takes them


class SetRun(Message):
    """One prompt set in one pass, with vLLM's counters."""

    prompt_set: str
    pass_name: str = "greedy"
    temperature: float
    answers: list[list[int]]
    steps: int
    accepted_by_position: list[int]
    # Of each answer, the tokens of each step; the first step is that of the prompt.
    by_step: list[list[int]] = Field(default=[])
    cached_tokens: list[int] = Field(default=[])  # of each prompt

    @property
    def acceptance_length(self) -> float:
        return 1 + sum(self.accepted_by_position) / max(self.steps, 1)


class SessionResult(Message):
    runs: list[SetRun]


def can_record(target: str, vllm_flags: Sequence[str]) -> bool:
    """Whether drafts can be recorded: the drafter must run in the engine's own process."""
    arguments = engine_arguments(target, vllm_flags)
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    return all(arguments.get(name, 1) == 1 for name in sizes)


def run_session(request: SessionRequest, report: Report = ignore_progress) -> SessionResult:
    """Run a session in a child process."""
    environment = exact_environment(request.dtype)
    return run_module(__spec__.name, request, SessionResult, report, environment)


def _run_session_here(request: SessionRequest, report: Report) -> SessionResult:
    arguments = engine_arguments(request.target, request.vllm_flags, fixed=SESSION_SETTINGS)
    engine = TextEngine(
        request.target,
        max_length=request.max_length,
        max_requests=SESSION_CONCURRENCY,
        dtype=request.dtype,
        drafter=request.drafter,
        draft_tokens=request.draft_tokens,
        # The recorder's hooks do not run in a captured graph.
        **arguments | {"enforce_eager": True},
    )
    report("vLLM has started")
    if request.recording is not None:
        recording = request.recording
        write_texts(_record(engine, recording, request.draft_tokens), recording.path)
        report(f"recorded drafts of {len(recording.prompts)} prompts")
    runs = []
    for each in request.passes:
        if each.temperature > 0 and request.drafter is not None and not engine.drafts_for_sampled:
            continue
        if not each.warm:
            engine.reset_prefix_cache()
        numbers = itertools.count()  # unique over all sets
        for name, prompts in request.prompts.items():
            if each.sets is not None and name not in each.sets:
                continue
            if each.warm and max(map(len, prompts), default=0) <= engine.cache_block:
                continue
            requests = [
                TextRequest(
                    f"{each.name}/{number}",
                    prompt,
                    request.max_tokens,
                    each.temperature,
                    seed=number,
                )
                for prompt, number in zip(prompts, numbers, strict=False)
            ]
            runs.append(_run_set(engine, name, each, requests))
            report(f"{name} ({each.name})")
    return SessionResult(runs=runs)


def _run_set(
    engine: TextEngine, name: str, settings: Pass, requests: Sequence[TextRequest]
) -> SetRun:
    steps_before, accepted_before = _acceptance_counts(engine)
    batch = settings.batch or max(len(requests), 1)
    completions = [
        each
        for start in range(0, len(requests), batch)
        for each in engine.complete(requests[start : start + batch])
    ]
    steps, accepted = _acceptance_counts(engine)
    return SetRun(
        prompt_set=name,
        pass_name=settings.name,
        temperature=settings.temperature,
        answers=[each.tokens for each in completions],
        steps=steps - steps_before,
        accepted_by_position=[
            now - before for now, before in zip(accepted, accepted_before, strict=True)
        ],
        by_step=[each.by_step for each in completions],
        cached_tokens=[each.cached_tokens for each in completions],
    )


def _acceptance_counts(engine: TextEngine) -> tuple[int, list[int]]:
    """Drafted blocks so far, and accepted drafts by position."""
    counters = engine.counters()
    return (
        counters.get("vllm:spec_decode_num_drafts", 0),
        list(counters.get("vllm:spec_decode_num_accepted_tokens_per_pos", [])),
    )


def _record(engine: TextEngine, recording: Recording, draft_tokens: int) -> list[RecordedText]:
    recorder = DraftRecorder(recording.blocks)
    # Enough for that many blocks even if every draft is accepted.
    max_tokens = recording.blocks * (draft_tokens + 1) + 1
    texts = []
    with recorder.attached(engine.draft_model()):
        for number, prompt in enumerate(recording.prompts):
            engine.reset_prefix_cache()
            request = TextRequest(f"recorded/{number}", prompt, max_tokens)
            (completion,) = engine.complete([request])
            texts.append(recorder.take([*prompt, *completion.tokens]))
    return texts


if __name__ == "__main__":
    answer_requests(SessionRequest, _run_session_here)
