"""Replays decoding on a faked GPU: which steps run in full CUDA graphs.

    python -m support.gpu_dispatch H100 16 64

prints the shares for 16 and for 64 requests as JSON. Everything that decides is real: the config of
`leadout serve`, vLLM's scheduler with Leadout's live control in it, two batches in flight as with
async scheduling, and the graph manager of vLLM's V2 runner. Made up are the requests, which drafts
are accepted, and how long a step takes; a step outside full graphs takes longer, as on a GPU.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.gpu_graphs import EAGER, FULL, PIECEWISE, Graphs
from support.gpu_resolution import (
    Mode,
    Pair,
    in_engine,
    planned_config,
    run_on_fake_gpu,
    write_pair,
)

MODES = (
    Mode(("--draft",)),
    Mode(("--draft", "--tuned")),
    Mode(("--draft", "--live")),
    Mode(("--draft", "--tuned", "--live")),
)
# Of more requests some would wait for the token budget of the smaller GPUs, at each step.
CONCURRENCIES = (1, 5, 13, 31, 64)
DECODE_STEPS = 400  # of each cell with live control
FIXED_STEPS = 50  # of one whose table decides: they are all alike
IN_FLIGHT = 2
PROMPT_TOKENS, OUTPUT_TOKENS = (20, 200), (100, 600)
BLOCKS = 65_536  # of the KV cache: memory is no limit here
# Chance that a draft is accepted after the one before it; each request has its own.
ACCEPTANCE = (0.2, 0.95)


@dataclass(frozen=True)
class StepSeconds:
    """How long a step takes on the made-up machine."""

    base: float = 0.008
    per_token: float = 0.00001
    draft: float = 0.001
    piecewise: float = 0.003  # more than in a full graph
    eager: float = 0.012

    def of(self, tokens: int, graph: str) -> float:
        extra = {FULL: 0.0, PIECEWISE: self.piecewise, EAGER: self.eager}[graph]
        return self.base + self.per_token * tokens + self.draft + extra


@dataclass
class Shares:
    """What the steps of one cell ran in."""

    graphs: Counter[str] = field(default_factory=Counter)  # of steps that only decode
    drafter: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)  # K by request and step
    uniform: int = 0
    other_steps: int = 0  # with prefill

    def add(self, tokens: Sequence[int], graph: str, drafter: str) -> None:
        self.graphs[graph] += 1
        self.drafter[drafter] += 1
        self.lengths.update(count - 1 for count in tokens)
        self.uniform += len(set(tokens)) == 1

    @property
    def steps(self) -> int:
        return sum(self.graphs.values())

    def as_row(self) -> dict[str, Any]:
        requests = sum(self.lengths.values())
        return {
            "decode_steps": self.steps,
            "steps_with_prefill": self.other_steps,
            "full": self.graphs[FULL] / self.steps,
            "piecewise": self.graphs[PIECEWISE] / self.steps,
            "eager": self.graphs[EAGER] / self.steps,
            "drafter_full": self.drafter[FULL] / self.steps,
            "uniform": self.uniform / self.steps,
            "mean_k": sum(k * count for k, count in self.lengths.items()) / requests,
        }


def cells_on(gpu: str, concurrencies: Sequence[int] = CONCURRENCIES) -> list[dict[str, Any]]:
    """The cells of one GPU, replayed in a process of its own."""
    counts = map(str, concurrencies)
    cells: list[dict[str, Any]] = run_on_fake_gpu("support.gpu_dispatch", gpu, *counts)
    return cells


# In the child process


class Clock:
    """Stands in for `time.perf_counter`: steps take the time of the made-up machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_scheduler(vllm_config: Any) -> Any:
    """The scheduler of this config, as vLLM's engine constructs it."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    model = vllm_config.model_config
    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    vllm_config.cache_config.num_gpu_blocks = BLOCKS
    vllm_config.cache_config.enable_prefix_caching = False  # no two prompts begin alike
    model.skip_tokenizer_init = True  # for grammars, of which there are none
    groups = [KVCacheGroupSpec(["layer"], spec)]
    scheduler_class = vllm_config.scheduler_config.get_scheduler_cls()
    return scheduler_class(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(BLOCKS, [], groups),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=16,
        hash_block_size=16,
    )


@dataclass(frozen=True)
class FlyingStep:
    """A step that the model has not ended yet."""

    scheduled: Any
    seconds: float
    sampling: frozenset[str]


class Replay:
    """Keeps a number of requests decoding, and records which graphs their steps run in."""

    def __init__(self, vllm_config: Any, concurrency: int, clock: Clock) -> None:
        from vllm.config import set_current_vllm_config

        self._clock, self._concurrency = clock, concurrency
        self._rng = random.Random(concurrency)
        self._graphs = Graphs(vllm_config)
        with set_current_vllm_config(vllm_config):
            self.scheduler = make_scheduler(vllm_config)
        self._acceptance: dict[str, float] = {}
        self._count = 0

    def run(self, decode_steps: int) -> Shares:
        """At least so many steps that only decode."""
        shares = Shares()
        flying: deque[FlyingStep] = deque()
        while shares.steps < decode_steps:
            self._fill()
            scheduled = self.scheduler.schedule()
            if not scheduled.total_num_scheduled_tokens:
                if not flying:
                    raise RuntimeError("the scheduler has nothing to do")
                self._finish(flying.popleft())
                continue
            step = FlyingStep(
                scheduled, self._dispatch(scheduled, shares), self._sampling(scheduled)
            )
            flying.append(step)
            if len(flying) == IN_FLIGHT:
                self._finish(flying.popleft())
        return shares

    def _fill(self) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        while len(self.scheduler.requests) < self._concurrency:
            name = f"request-{self._count}"
            self._count += 1
            self._acceptance[name] = self._rng.uniform(*ACCEPTANCE)
            params = SamplingParams(
                temperature=0.0, max_tokens=self._rng.randint(*OUTPUT_TOKENS), ignore_eos=True
            )
            prompt = [self._rng.randrange(300) for _ in range(self._rng.randint(*PROMPT_TOKENS))]
            self.scheduler.add_request(Request(name, prompt, params, None))

    def _dispatch(self, scheduled: Any, shares: Shares) -> float:
        """Record the graph of a step, and return its seconds."""
        tokens = list(scheduled.num_scheduled_tokens.values())
        total = sum(tokens)
        if self._has_prefill(scheduled):
            shares.other_steps += 1
            return StepSeconds().of(total, PIECEWISE)
        graph = self._graphs.dispatch(tokens)
        shares.add(tokens, graph, self._graphs.dispatch_draft(len(tokens)))
        return StepSeconds().of(total, graph)

    def _has_prefill(self, scheduled: Any) -> bool:
        cached = scheduled.scheduled_cached_reqs
        return bool(scheduled.scheduled_new_reqs) or any(
            computed < self.scheduler.requests[name].num_prompt_tokens
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        )

    def _sampling(self, scheduled: Any) -> frozenset[str]:
        """The requests that get tokens from this step: their prompt does not go on after it."""
        requests = self.scheduler.requests
        names = scheduled.num_scheduled_tokens
        return frozenset(name for name in names if not requests[name].is_prefill_chunk)

    def _finish(self, step: FlyingStep) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        self._clock.now += step.seconds
        scheduled = step.scheduled
        names = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[self._sampled(name, step) for name in names],
        )
        self.scheduler.update_from_output(scheduled, output)

    def _sampled(self, name: str, step: FlyingStep) -> list[int]:
        if name not in step.sampling:
            return []
        accepted = 0
        for _ in step.scheduled.scheduled_spec_decode_tokens.get(name, ()):
            if self._rng.random() >= self._acceptance[name]:
                break
            accepted += 1
        return [7] * (1 + accepted)


def replay_all(pair: Pair, concurrencies: Sequence[int]) -> Iterator[dict[str, Any]]:
    for mode in MODES:
        for concurrency in concurrencies:
            clock = Clock()  # its own, so that a cell does not depend on those before it
            time.perf_counter = clock  # type: ignore[assignment]
            config = in_engine(planned_config(pair, mode))
            replay = Replay(config, concurrency, clock)
            is_live = "--live" in mode.leadout
            shares = replay.run(DECODE_STEPS if is_live else FIXED_STEPS)
            replay.scheduler.shutdown()
            yield {"mode": mode.name, "concurrency": concurrency, **shares.as_row()}


def main() -> None:
    from support.fake_gpu import install

    gpu, *counts = sys.argv[1:]
    install(gpu)
    os.environ.pop("LEADOUT_PLUGIN", None)  # it switches live control off
    with tempfile.TemporaryDirectory() as folder:
        cells = list(replay_all(write_pair(Path(folder)), [int(each) for each in counts]))
    print("RESULT " + json.dumps(cells))


if __name__ == "__main__":
    main()
