"""Where a step with drafts spends its time: target, head, sampling, and each part of drafting.

    python experiments/bench_profile.py TARGET DRAFTER --out FILE

One engine runs in this process, and methods of its objects are timed. The time of a part excludes
the parts inside it. `rest` is the remaining time of a step: scheduling, inputs, bookkeeping. A
drafter with a reduced vocabulary is measured twice: as `leadout serve` runs it, and with logits
over the target's vocabulary, vLLM's default.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import provenance
from leadout.checkpoints import read_checkpoint
from leadout.data.chat import Chat
from leadout.engine.offline import TextEngine, TextRequest
from leadout.engine.vllm_flags import LOCAL_ARGMAX
from leadout.evaluate.prompts import prompts_or_default

BATCHES = (1, 4, 8, 16)
STEPS, WARM_UP = 40, 6


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
    profile, with_logits = {}, {}
    for batch in BATCHES:
        if is_reduced:
            with_logits[str(batch)] = measure(engine, clock, prompts, batch)
        setattr(runner.drafter, LOCAL_ARGMAX, is_reduced)
        profile[str(batch)] = measure(engine, clock, prompts, batch)
        setattr(runner.drafter, LOCAL_ARGMAX, False)
    result: dict[str, Any] = {
        "provenance": provenance(target=arguments.target, drafter=arguments.drafter),
        "unit": "milliseconds, median over steps",
        "k": k,
        "dtype": arguments.dtype,
        "by_batch_size": profile,
    }
    if is_reduced:
        result["with_logits_over_the_targets_vocabulary"] = with_logits
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def watch(runner: Any) -> Clock:
    clock, target, draft = Clock(), runner.model, runner.drafter.model
    clock.time(target, "forward", "target layers")
    clock.time(target, "compute_logits", "target head")
    clock.time(runner, "_sample", "sampling and verification")
    clock.time(runner.drafter, "propose", "drafter, the rest")
    clock.time(draft, "combine_hidden_states", "drafter, context features")
    clock.time(draft, "precompute_and_store_context_kv", "drafter, context keys and values")
    clock.time(draft, "forward", "drafter, layers")
    clock.time(draft, "compute_logits", "drafter, head")
    clock.time(draft, "get_top_tokens", "drafter, head")
    return clock


def measure(
    engine: TextEngine, clock: Clock, prompts: list[list[int]], batch: int
) -> dict[str, float]:
    names = [f"{batch}_{place}" for place in range(batch)]
    for place, name in enumerate(names):
        prompt = prompts[place % len(prompts)]
        engine.submit(TextRequest(name, prompt, 512, ignore_eos=True))
    steps: list[dict[str, float]] = []
    for _ in range(STEPS):
        clock.parts.clear()
        began = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - began
        parts = dict(clock.parts)
        steps.append({**parts, "rest": seconds - sum(parts.values()), "step": seconds})
    engine._llm.llm_engine.abort_request(names)
    kept = steps[WARM_UP:]
    return {name: 1e3 * statistics.median(s[name] for s in kept) for name in kept[0]}


if __name__ == "__main__":
    main()
