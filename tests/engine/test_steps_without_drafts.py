"""Where a table says K = 0 the draft layers rest, and later drafts are as if they had not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leadout.checkpoints import load_drafter
from leadout.dflash.target import Target
from support.engine_drafts import record_drafts, reference_drafts
from support.shared import QUICK_DRAFTER, chat_tokens, first_turns

SHORT, LONG, K = 12, 36, 3


def test_drafts_after_steps_without_drafts_are_the_references(
    run_engine: Callable[..., Any], smollm2: Path
) -> None:
    from vllm import SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = [chat_tokens(tokenizer, turn) for turn in first_turns("gsm8k", 3)]
    drafter = load_drafter(QUICK_DRAFTER, dtype=torch.float32)
    speculative = {
        "method": "dflash",
        "model": str(QUICK_DRAFTER),
        "num_speculative_tokens": K,
        "num_speculative_tokens_per_batch_size": [[1, 1, K], [2, 8, 0]],
    }
    slots: list[int] = []
    with run_engine(smollm2, speculative_config=speculative) as llm:
        recorded = record_drafts(llm)
        (layer,) = llm.collective_rpc(lambda worker: worker.get_draft_model().model.layers[0])
        layer.register_forward_hook(
            lambda _, __, given, ___: slots.append(len(given["positions"])), with_kwargs=True
        )
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [
                SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
                for length in (SHORT, SHORT, LONG)  # the last goes on alone
            ],
            use_tqdm=False,
        )

    assert slots
    assert set(slots) == {1 + K}, "the layers ran for anchors that nobody drafts from"
    text = prompts[2] + list(outputs[2].outputs[0].token_ids)
    drafted = [draft for draft in recorded if draft.tokens and draft.length <= len(text)]
    assert min(draft.length for draft in drafted) >= len(prompts[2]) + SHORT - 1
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    wanted = reference_drafts(
        Target(model, drafter.config.target_layer_ids),
        drafter,
        text,
        [draft.length for draft in drafted],
        K,
    )
    assert [draft.tokens for draft in drafted] == wanted
