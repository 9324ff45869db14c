"""Where a table says K = 0 the drafter rests, and later drafts are as if it had not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leadout.checkpoints import load_drafter
from leadout.dflash.target import Target
from leadout.engine.draft_model import MAX_DEFERRED
from support.drafters import write_random_drafter
from support.engine_drafts import record_drafts, reference_drafts
from support.shared import QUICK_DRAFTER, chat_tokens, first_turns
from support.tiny_targets import drafter_config, write_tiny_target

SHORT, LONG, K = 50, 90, 3
ALONE = 6  # steps before the others join, and so K = 0


def test_drafts_after_steps_without_drafts_are_the_references(
    run_engine: Callable[..., Any], smollm2: Path
) -> None:
    from vllm import SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    # Those that join are so short that the context waits, with the drafts that were just rejected.
    first, *others = (chat_tokens(tokenizer, turn) for turn in first_turns("gsm8k", 3))
    prompts = [first, *(prompt[-20:] for prompt in others)]
    drafter = load_drafter(QUICK_DRAFTER, dtype=torch.float32)
    speculative = {
        "method": "dflash",
        "model": str(QUICK_DRAFTER),
        "num_speculative_tokens": K,
        "num_speculative_tokens_per_batch_size": [[1, 1, K], [2, 8, 0]],
    }
    slots: list[int] = []
    contexts: list[int] = []  # tokens of each pass that stores keys and values
    with run_engine(smollm2, speculative_config=speculative) as llm:
        recorded = record_drafts(llm)
        (model,) = llm.collective_rpc(lambda worker: worker.get_draft_model().model)
        model.layers[0].register_forward_hook(
            lambda _, __, given, ___: slots.append(len(given["positions"])), with_kwargs=True
        )
        model.fc.register_forward_hook(lambda _, given, __: contexts.append(len(given[0])))

        def add(number: int, length: int) -> None:
            llm.llm_engine.add_request(
                str(number),
                {"prompt_token_ids": prompts[number]},
                SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True),
            )

        add(0, LONG)  # drafts alone, then without drafts beside others, then alone again
        finished: list[Any] = []
        steps = 0
        while llm.llm_engine.has_unfinished_requests():
            finished += [each for each in llm.llm_engine.step() if each.finished]
            steps += 1
            if steps == ALONE:
                add(1, SHORT)
                add(2, SHORT)

    assert slots
    assert set(slots) == {1 + K}, "the layers ran for anchors that nobody drafts from"
    idle = len(contexts) - len(slots)
    assert idle < SHORT / 10, "context was stored at most steps without drafts"
    assert max(contexts[1:]) > MAX_DEFERRED, "no context had to wait"
    text = prompts[0] + list(finished[-1].outputs[0].token_ids)
    drafted = [draft for draft in recorded if draft.tokens and draft.length <= len(text)]
    before = [draft for draft in drafted if draft.length < len(prompts[0]) + ALONE * (K + 1)]
    assert before, "no draft was verified, and so rejected, before the steps without drafts"
    assert len(before) < len(drafted)
    target = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    wanted = reference_drafts(
        Target(target, drafter.config.target_layer_ids),
        drafter,
        text,
        [draft.length for draft in drafted],
        K,
    )
    assert [draft.tokens for draft in drafted] == wanted


def test_context_never_waits_where_layers_of_several_kinds_share_the_cache(
    run_engine: Callable[..., Any], tmp_path: Path
) -> None:
    """A block that one group of layers frees may be another's when the context would be stored."""
    from vllm import SamplingParams

    target = write_tiny_target(tmp_path / "target", "sliding")
    config = drafter_config("sliding")
    config = replace(config, layers=config.layers[:1])  # vLLM serves no other beside such a target
    speculative = {
        "method": "dflash",
        "model": str(write_random_drafter(tmp_path / "drafter", config)),
        "num_speculative_tokens": config.max_draft_tokens,
        "num_speculative_tokens_per_batch_size": [[1, 8, 0]],
    }
    contexts: list[int] = []
    with run_engine(target, max_model_len=256, speculative_config=speculative) as llm:
        (model,) = llm.collective_rpc(lambda worker: worker.get_draft_model().model)
        model.fc.register_forward_hook(lambda _, given, __: contexts.append(len(given[0])))
        prompt = {"prompt_token_ids": [5, 9, 2, 44, 7]}
        sampling = SamplingParams(temperature=0.0, max_tokens=SHORT, ignore_eos=True)
        llm.generate([prompt], sampling, use_tqdm=False)

    assert contexts == [5, *[1] * (SHORT - 1)]
