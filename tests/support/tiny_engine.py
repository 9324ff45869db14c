"""Runs one small engine in a process of its own and prints what it drafted, as JSON.

    python -m support.tiny_engine MODEL DRAFTER K [--v2 [--record FOLDER] [--async-scheduling]
        [--known-drafts]] [--tensor-parallel N] [--speculation JSON]

`--v2` runs vLLM's V2 model runner, which needs Triton, in Triton's interpreter: slow and exact.
vLLM's CPU platform switches async scheduling off; with `--async-scheduling` it stays on, as on
GPUs. With `--known-drafts` all prompts are asked once more, together, with drafts from the answers
that are known by then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leadout.engine.settings import LiveSettings

PROMPTS = ([5, 9, 2, 44, 7, 7, 31, 200, 13], [60, 61, 62, 300])
TOKENS = 12


def let_triton_interpret() -> None:
    """Make Triton believe in a CPU driver before vLLM asks for one; its kernels are interpreted."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)


def keep_async_scheduling() -> None:
    from vllm.platforms.cpu import CpuPlatform

    usual = CpuPlatform.check_and_update_config

    def keep(vllm_config: Any) -> None:
        usual(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(keep)


def draft_known(speculator: Any, texts: list[list[int]], draft_tokens: int) -> dict[str, int]:
    """Makes a V2 speculator propose what these texts continue with, often with a wrong token.

    Returns how many draft tokens were accepted and rejected, counted from now on.
    """
    propose, chance = speculator.propose, random.Random(0)
    counts = {"accepted": 0, "rejected": 0}

    def propose_text(
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Any,
        num_rejected: Any,
        *arguments: Any,
        **settings: Any,
    ) -> Any:
        import torch

        drafts = propose(
            *(input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states),
            *(num_sampled, num_rejected, *arguments),
            **settings,
        )
        for row in range(input_batch.num_reqs):
            wrong, sampled = int(num_rejected[row]), int(num_sampled[row])
            counts["rejected"] += wrong
            counts["accepted"] += max(sampled - 1, 0)
            last = int(input_batch.query_start_loc_np[row + 1]) - 1 - wrong
            place, known = int(input_batch.positions[last]), int(input_batch.input_ids[last])
            for text in texts:
                drafted = text[place + 2 : place + 2 + draft_tokens]
                if len(drafted) == draft_tokens and text[place] == known:
                    if chance.random() < 0.5:
                        drafted[chance.randrange(draft_tokens)] = chance.randrange(10, 300)
                    drafts[row] = torch.tensor(drafted)
        return drafts

    speculator.propose = propose_text  # of this one object
    return counts


def live_engine_arguments(settings: LiveSettings) -> dict[str, Any]:
    """Arguments of vLLM's `LLM` that switch live control on."""
    from leadout.engine.settings import LIVE, SCHEDULER, with_section

    return {"scheduler_cls": SCHEDULER, "additional_config": with_section({}, LIVE, settings)}


def engine_arguments(
    drafter: str | Path, draft_tokens: int, speculation: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`; `speculation` is more of its speculative config."""
    return {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "speculative_config": {
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": draft_tokens,
            **speculation,
        },
    }


def draft_on_v1(llm: Any) -> dict[str, Any]:
    """The answers of this engine, which has the V1 runner, and every block that it drafts."""
    from support.engine_drafts import record_drafts

    recorded = record_drafts(llm)

    def take_drafts() -> list[list[int]]:
        drafts = [list(draft.tokens) for draft in recorded]
        recorded.clear()
        return drafts

    return _ask(llm, take_drafts)


def _ask(llm: Any, take_drafts: Callable[[], list[list[int]]]) -> dict[str, Any]:
    """`take_drafts` returns the blocks that were drafted since it was called last."""
    from vllm import SamplingParams

    drafter_class = llm.collective_rpc(_class_of_drafter)[0]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    answers = []
    drafts = []
    for prompt in PROMPTS:  # one at a time, so that blocks come in the order of their steps
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
        drafts.append(take_drafts())
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return {
        "answers": answers,
        "drafts": drafts,
        "drafter_class": drafter_class,
        "scheduler_classes": [each.__name__ for each in type(scheduler).__mro__],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("drafter")
    parser.add_argument("draft_tokens", type=int)
    parser.add_argument("--v2", action="store_true")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--record", type=Path, help="folder for the drafter's steps, with --v2")
    parser.add_argument("--async-scheduling", action="store_true", help="with --v2")
    parser.add_argument("--known-drafts", action="store_true", help="with --v2")
    parser.add_argument("--settings", type=json.loads, default={}, help="of vLLM's, as JSON")
    parser.add_argument("--speculation", type=json.loads, default={}, help="more of its config")
    arguments = parser.parse_args()
    if arguments.v2:
        let_triton_interpret()
    if arguments.async_scheduling:
        keep_async_scheduling()
        arguments.settings["async_scheduling"] = True

    from vllm import LLM, SamplingParams

    from leadout.engine.inspection import DraftStepRecorder, write_steps

    usual = engine_arguments(arguments.drafter, arguments.draft_tokens, arguments.speculation)
    llm = LLM(
        model=arguments.model,
        enforce_eager=True,
        tensor_parallel_size=arguments.tensor_parallel,
        **{"dtype": "float32", **usual, **arguments.settings},
    )
    print("STARTED", flush=True)
    if arguments.v2:
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        recorder, numbers = DraftStepRecorder(runner, "V2"), count(1)

        def take_drafts() -> list[list[int]]:
            drafts = [step.drafts.tolist() for step in recorder.steps]
            if arguments.record is not None:
                write_steps(recorder.steps, arguments.record / f"{next(numbers)}.safetensors")
            recorder.steps.clear()
            return drafts

        result = _ask(llm, take_drafts)
    else:
        result = draft_on_v1(llm)
    if arguments.known_drafts:
        pairs = zip(PROMPTS, result["answers"], strict=True)
        texts = [[*prompt, *answer] for prompt, answer in pairs]
        counts = draft_known(runner.speculator, texts, arguments.draft_tokens)
        params = SamplingParams(
            temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
        result["answers_with_known_drafts"] = [list(o.outputs[0].token_ids) for o in outputs]
        result |= counts
    print("RESULT " + json.dumps(result))


def _class_of_drafter(worker: Any) -> str:
    return type(worker.get_draft_model()).__name__


if __name__ == "__main__":
    main()
