"""Runs a drafter on vLLM's V2 runner with async scheduling, and prints what came, as JSON.

    python -m support.live_on_v2 TARGET REGISTRY K PROMPTS {live,tuned}

`live` has live control with random decisions, `tuned` a table of K. Half way the drafter is swapped
for version 2 of the registry, and then back. vLLM's CPU platform switches async scheduling off;
here it stays on, as on GPUs. Kernels run in Triton's interpreter.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from support.tiny_engine import keep_async_scheduling, let_triton_interpret

TOKENS = 10


def main() -> None:
    target, folder, draft_tokens, prompts, mode = sys.argv[1:]
    let_triton_interpret()

    from vllm import LLM

    from leadout.engine.settings import (
        IDLE_DRAFTER_WORKER,
        LIVE,
        REGISTRY,
        SCHEDULER,
        WORKER_EXTENSION,
        LiveSettings,
        RegistrySettings,
        with_section,
    )
    from leadout.engine.vllm_adapter import AsyncScheduler
    from leadout.registry import Registry

    keep_async_scheduling()
    registry, max_drafts = Registry(Path(folder)), int(draft_tokens)
    additional = with_section({}, REGISTRY, RegistrySettings(folder=registry.folder))
    if mode == "live":
        additional = with_section(additional, LIVE, LiveSettings())
    llm = LLM(
        model=target,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        enable_prefix_caching=False,
        async_scheduling=True,
        scheduler_cls=SCHEDULER,
        worker_cls=IDLE_DRAFTER_WORKER,
        worker_extension_cls=WORKER_EXTENSION,
        additional_config=additional,
        speculative_config={
            "method": "dflash",
            "model": str(registry.path(1)),
            "num_speculative_tokens": max_drafts,
            "num_speculative_tokens_per_batch_size": [(1, 1, max_drafts), (2, 2, 1), (3, 4, 0)],
        },
    )
    core = llm.llm_engine.engine_core.engine_core
    scheduler, runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
    control = getattr(scheduler, "_control", None)
    lengths: list[int] = []
    if control is not None:
        control._policy = random_policy(max_drafts, lengths)
    blocks = count_blocks(runner.speculator)
    asked = json.loads(prompts)
    answers, norms = [], []
    for version in (1, 2, 1):
        if answers:
            swap(llm, version)
        answers.append(answers_to(llm, asked))
        norms += llm.collective_rpc(last_norm)
    result = {
        "answers": answers,
        "norms": norms,
        "is_async": isinstance(scheduler, AsyncScheduler),
        "lengths": lengths,
        "control": control is not None and scheduler._control is control,
        "lookup_min_match": None if control is None else control._min_match,
        **blocks,
    }
    print("RESULT " + json.dumps(result))


def random_policy(max_drafts: int, lengths: list[int]) -> Any:
    from leadout.control.policy import Decision, Policy

    rng = random.Random(0)

    class RandomPolicy(Policy):
        def decide(self, requests: Any) -> Decision:
            verify = tuple(rng.randint(0, each) for each in requests.available.tolist())
            use_lookup = (False,) * len(verify)
            return Decision(verify, rng.randint(0, max_drafts), False, None, use_lookup)

        def observe(
            self, outcomes: Any, k: int, seconds: float | None, prefill: int = 0, **_: bool
        ) -> None:
            lengths.extend(outcomes.verified.tolist())

    return RandomPolicy(max_drafts)


def count_blocks(speculator: Any) -> dict[str, int]:
    """Steps by whether they asked for drafts, and blocks that the draft layers computed."""
    counts = {"steps_with_drafts": 0, "steps_without_drafts": 0, "blocks": 0}
    propose, generate = speculator.propose, speculator._generate_draft

    def count_step(*arguments: Any, **settings: Any) -> Any:
        wanted = "without" if settings["num_speculative_tokens"] == 0 else "with"
        counts[f"steps_{wanted}_drafts"] += 1
        return propose(*arguments, **settings)

    def count_block(*arguments: Any, **settings: Any) -> Any:
        if not speculator._stores_context_only:
            counts["blocks"] += 1
        return generate(*arguments, **settings)

    speculator.propose, speculator._generate_draft = count_step, count_block
    return counts


def swap(llm: Any, version: int) -> None:
    """As a server does between two steps; here requests have ended."""
    llm.collective_rpc("leadout_begin", args=(version,))
    (state,) = llm.collective_rpc("leadout_state")
    while not state["done"]:
        time.sleep(0.05)
        (state,) = llm.collective_rpc("leadout_state")
    assert state["error"] is None, state
    (committed,) = llm.collective_rpc("leadout_commit", args=(version,))
    assert committed["error"] is None, committed
    llm.collective_rpc("leadout_end")


def last_norm(worker: Any) -> list[float]:
    """A tensor of the drafter as the worker has it."""
    weights: list[float] = worker.get_draft_model().model.norm.weight.tolist()
    return weights


def answers_to(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = []
    for batch in (asked, asked[:1]):  # a table has other K for other batch sizes
        outputs = llm.generate(batch, params, use_tqdm=False)
        found += [list(output.outputs[0].token_ids) for output in outputs]
    return found


if __name__ == "__main__":
    main()
