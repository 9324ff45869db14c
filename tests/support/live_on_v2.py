"""Runs live control on vLLM's V2 runner with random decisions, and prints what came, as JSON."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from support.tiny_engine import let_triton_interpret, live_engine_arguments


def main() -> None:
    target, drafter, draft_tokens, prompts = sys.argv[1:]
    let_triton_interpret()

    from vllm import LLM, SamplingParams

    from leadout.control.policy import Decision, Policy
    from leadout.engine.settings import LiveSettings

    max_drafts = int(draft_tokens)
    rng = random.Random(0)
    lengths: list[int] = []

    class RandomPolicy(Policy):
        def decide(self, requests: Any) -> Decision:
            verify = tuple(rng.randint(0, each) for each in requests.available.tolist())
            use_lookup = (False,) * len(verify)
            return Decision(verify, rng.randint(0, max_drafts), False, None, use_lookup)

        def observe(self, outcomes: Any, k: int, seconds: float | None, prefill: int = 0) -> None:
            lengths.extend(outcomes.verified.tolist())

    llm = LLM(
        model=target,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        enable_prefix_caching=False,
        speculative_config={
            "method": "dflash",
            "model": drafter,
            "num_speculative_tokens": max_drafts,
        },
        **live_engine_arguments(LiveSettings()),
    )
    control = llm.llm_engine.engine_core.engine_core.scheduler._control
    control._policy = RandomPolicy(max_drafts)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    outputs = llm.generate(asked, params, use_tqdm=False)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    result = {
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "lengths": lengths,
        "control": scheduler._control is control,
        "lookup_min_match": control._min_match,
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
