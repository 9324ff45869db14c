"""vLLM drafts what the reference drafts, from either file format."""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.transformers_utils.configs.speculators.algos import update_dflash

from leadout.checkpoints import convert, load_drafter
from leadout.dflash.drafter import Drafter
from leadout.dflash.target import Target
from leadout.engine.plugin import FLAG, SWITCH
from leadout.train.init import reduce_draft_vocab
from support.engine_drafts import record_drafts, reference_drafts
from support.models import ROOT
from support.shared import QUICK_DRAFTER, chat_tokens, first_turns

PROMPTS, TOKENS, AGREEMENT = {"gsm8k": 7, "humaneval": 6, "mt_bench": 7}, 48, 0.995
EACH = 3  # every third of them at every change, all of them nightly
DRAFT_VOCAB = 400


@pytest.fixture(scope="module")
def all_prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    turns = [turn for name, count in PROMPTS.items() for turn in first_turns(name, count)]
    assert len(turns) == sum(PROMPTS.values())
    return [chat_tokens(tokenizer, turn) for turn in turns]


@pytest.fixture(scope="module")
def prompts(all_prompts: list[list[int]], nightly: bool) -> list[list[int]]:
    return all_prompts if nightly else all_prompts[::EACH]


@pytest.fixture(scope="module")
def target(smollm2: Path) -> Target:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    return Target(model, load_drafter(QUICK_DRAFTER).config.target_layer_ids)


def agreement(
    run_engine: Callable[..., Any],
    smollm2: Path,
    target: Target,
    served: Path,
    prompts: list[list[int]],
    drafter: Drafter | None = None,
) -> float:
    """Share of draft positions at which the engine, serving `served`, agrees with the reference."""
    from vllm import SamplingParams

    drafter = drafter or load_drafter(QUICK_DRAFTER, dtype=torch.float32)
    count = drafter.config.max_draft_tokens
    speculative = {"method": "dflash", "model": str(served), "num_speculative_tokens": count}
    with run_engine(smollm2, speculative_config=speculative) as llm:
        recorded = record_drafts(llm)
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)

    same = compared = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        text = prompt + list(output.outputs[0].token_ids)
        # The engine may number a request "7-abcdef" where its output says "7".
        mine = [draft for draft in recorded if draft.request.split("-")[0] == output.request_id]
        # Drafts made after the last token are not part of the text's story.
        mine = [draft for draft in mine if draft.length <= len(text)]
        assert mine
        lengths = [draft.length for draft in mine]
        wanted = reference_drafts(target, drafter, text, lengths, count)
        for draft, reference in zip(mine, wanted, strict=True):
            assert len(draft.tokens) == count
            compared += count
            same += sum(a == b for a, b in zip(draft.tokens, reference, strict=True))
    assert compared > len(prompts) * TOKENS
    return same / compared


@pytest.mark.nightly  # that format, and its exact drafts: test_steps_without_drafts.py
def test_zlab_format_is_drafted_alike(
    run_engine: Callable[..., Any], smollm2: Path, target: Target, prompts: list[list[int]]
) -> None:
    assert agreement(run_engine, smollm2, target, QUICK_DRAFTER, prompts) >= AGREEMENT


@pytest.mark.nightly  # changes with vLLM's version only
def test_vllms_own_class_norms_context_keys_wrongly_on_cpus() -> None:
    # The fault that `LeadoutDFlashModel` mends: the very same comparison fails without it. Should
    # it pass one day, vLLM has mended its kernel and our class can go.
    same = f"{Path(__file__).relative_to(ROOT)}::test_zlab_format_is_drafted_alike"
    stock = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--nightly", "-p", "no:cacheprovider", same],
        cwd=ROOT,
        env={**os.environ, SWITCH: "0"},
        capture_output=True,
        text=True,
    )
    assert stock.returncode == 1
    measured = re.search(r"assert (0\.\d+) >= 0.995", stock.stdout)
    assert measured is not None, stock.stdout
    assert 0.5 < float(measured[1]) < 0.97


@pytest.mark.nightly  # with the other flag, which is harder: below
def test_speculators_format_is_drafted_alike(
    run_engine: Callable[..., Any],
    smollm2: Path,
    target: Target,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    written = tmp_path / "speculators"
    convert(QUICK_DRAFTER, written, "speculators", target_name=str(smollm2))
    assert agreement(run_engine, smollm2, target, written, prompts) >= AGREEMENT

    assert json.loads((written / "config.json").read_text())[FLAG] is True


def test_a_narrowed_drafter_is_drafted_alike(
    run_engine: Callable[..., Any],
    smollm2: Path,
    target: Target,
    prompts: list[list[int]],
    all_prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    written, _ = reduce_draft_vocab(
        QUICK_DRAFTER, tmp_path / "narrow", smollm2, all_prompts, DRAFT_VOCAB
    )
    reference = load_drafter(written.path, dtype=torch.float32)
    assert agreement(run_engine, smollm2, target, written.path, prompts, reference) >= AGREEMENT


def test_a_speculators_drafter_that_vllm_would_flip_is_served_as_trained(
    run_engine: Callable[..., Any],
    smollm2: Path,
    target: Target,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    written = tmp_path / "speculators"
    convert(QUICK_DRAFTER, written, "speculators", target_name=str(smollm2))
    config = json.loads((written / "config.json").read_text())
    # What the format's own library writes by default, and vLLM takes for "all layers causal".
    config[FLAG] = False
    (written / "config.json").write_text(json.dumps(config))
    vllm_would: dict[str, Any] = copy.deepcopy(config["transformer_layer_config"])
    update_dflash(config_dict=config, pre_trained_config=vllm_would)
    assert vllm_would["dflash_config"]["causal"] is True

    assert agreement(run_engine, smollm2, target, written, prompts) >= AGREEMENT
