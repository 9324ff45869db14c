"""Where a step with drafts spends its time: target, head, sampling, and each part of drafting.

    python experiments/bench_profile.py TARGET DRAFTER --out FILE

One engine runs in this process, and methods of its objects are timed. The time of a part excludes
the parts inside it. `rest` is the remaining time of a step: scheduling, inputs, bookkeeping. A
drafter with a reduced vocabulary is measured in two ways, which take turns step by step: as
`leadout serve` runs it, and with logits over the target's vocabulary, vLLM's default.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import provenance
from leadout.checkpoints import read_checkpoint
from leadout.data.chat import Chat
from leadout.engine.offline import TextEngine, TextRequest
from leadout.engine.vllm_flags import LOCAL_ARGMAX
from leadout.evaluate.prompts import prompts_or_default

BATCHES = (1, 4, 8, 16)
STEPS, WARM_UP = 30, 4
SERVED, WITH_LOGITS = "by_batch_size", "with_logits_over_the_targets_vocabulary"


class Clock:
    """Seconds of one step by part, each without the parts inside it."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self._open: list[float] = []

    def time(self, thing: Any, method: str, part: str) -> None:
        """Count the time of `thing.method` as `part` from now on."""
        whole = getattr(thing, method)

        def timed(*arguments: Any, **settings: Any) -> Any:
            self._open.append(0.0)
            began = time.perf_counter()
            result = whole(*arguments, **settings)
            took = time.perf_counter() - began
            self.parts[part] += took - self._open.pop()
            if self._open:
                self._open[-1] += took
            return result

        object.__setattr__(thing, method, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    config = read_checkpoint(arguments.drafter).config
    k, is_reduced = config.max_draft_tokens, config.draft_vocab_size is not None
    chat = Chat(arguments.target)
    prompts = [chat.prompt(prompt.turns[:1]) for prompt in prompts_or_default(())]
    prompts = [prompt for prompt in prompts if len(prompt) < 256]
    engine = TextEngine(
        str(arguments.target),
        max_length=1024,
        max_requests=max(BATCHES),
        dtype=arguments.dtype,
        drafter=str(arguments.drafter),
        draft_tokens=k,
        async_scheduling=False,  # a step is complete before the next is scheduled
        enable_prefix_caching=False,
    )
    (runner,) = engine._llm.collective_rpc(lambda worker: worker.model_runner)
    clock = watch(runner)
    ways: dict[str, Callable[[], None]] = {SERVED: lambda: None}
    if is_reduced:
        ways = {
            SERVED: lambda: setattr(runner.drafter, LOCAL_ARGMAX, True),
            WITH_LOGITS: lambda: setattr(runner.drafter, LOCAL_ARGMAX, False),
        }
    profile = {batch: measure(engine, clock, prompts, batch, ways) for batch in BATCHES}
    result = {
        "provenance": provenance(target=arguments.target, drafter=arguments.drafter),
        "unit": "milliseconds, median over steps",
        "k": k,
        "dtype": arguments.dtype,
        **{way: {str(batch): parts[way] for batch, parts in profile.items()} for way in ways},
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def watch(runner: Any) -> Clock:
    clock, target, draft = Clock(), runner.model, runner.drafter.model
    clock.time(target, "forward", "target layers")
    clock.time(target, "compute_logits", "target head")
    clock.time(runner, "_sample", "sampling and verification")
    clock.time(runner.drafter, "propose", "drafter, the rest")
    clock.time(draft.model.fc, "forward", "drafter, context features")
    clock.time(draft.model, "precompute_and_store_context_kv", "drafter, context keys and values")
    clock.time(draft, "forward", "drafter, layers")
    clock.time(draft, "compute_logits", "drafter, head")
    clock.time(draft, "get_top_tokens", "drafter, head")
    return clock


def measure(
    engine: TextEngine,
    clock: Clock,
    prompts: list[list[int]],
    batch: int,
    ways: dict[str, Callable[[], None]],
) -> dict[str, dict[str, float]]:
    """The median milliseconds of each part, for each of these ways to run a step."""
    names = [f"{batch}_{place}" for place in range(batch)]
    for place, name in enumerate(names):
        prompt = prompts[place % len(prompts)]
        engine.submit(TextRequest(name, prompt, 512, ignore_eos=True))
    steps: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(WARM_UP + STEPS):
        for way, choose in ways.items():
            choose()
            clock.parts.clear()
            began = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - began
            if number >= WARM_UP:
                parts = dict(clock.parts)
                rest = seconds - sum(parts.values())
                steps[way].append({**parts, "rest": rest, "step": seconds})
    engine._llm.llm_engine.abort_request(names)
    return {
        way: {part: 1e3 * statistics.median(step[part] for step in kept) for part in kept[0]}
        for way, kept in steps.items()
    }


if __name__ == "__main__":
    main()
