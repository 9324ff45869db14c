"""Replacing the drafter's weights in a running engine also replaces what is derived from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from leadout.checkpoints import CheckpointError, load_drafter, write_checkpoint
from leadout.dflash.target import Target
from leadout.engine.staging import StagedSwap, runtime_weights, stage
from support.drafters import TINY_DRAFTER, random_drafter
from support.engine_drafts import record_drafts, reference_drafts
from support.models import tiny_llama

CONFIG = replace(TINY_DRAFTER, target_num_layers=4)
K = CONFIG.max_draft_tokens
PROMPT = [5, 9, 2, 44, 7, 31, 200]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("drafters")
    for seed in (0, 1):
        weights = random_drafter(CONFIG, seed).state_dict()
        write_checkpoint(folder / str(seed), weights, CONFIG, "zlab")
    return [folder / "0", folder / "1"]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="module")
def llm(
    model: PreTrainedModel, drafters: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    from vllm import LLM

    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    speculation = {"method": "dflash", "model": str(drafters[0]), "num_speculative_tokens": K}
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        enable_prefix_caching=False,
        speculative_config=speculation,
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()


def drafted(llm: Any) -> tuple[list[int], list[tuple[int, ...]], list[int]]:
    """The text, the blocks drafted for it, and the lengths at which they were."""
    from vllm import SamplingParams

    recorded = record_drafts(llm)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    text = PROMPT + list(output.outputs[0].token_ids)
    blocks = [draft for draft in recorded if draft.length <= len(text)]
    return text, [draft.tokens for draft in blocks], [draft.length for draft in blocks]


def swap_weights(worker: Any, weights: dict[str, Any]) -> None:
    """As Leadout does."""
    drafter = worker.get_draft_model()
    new = stage(drafter, worker.get_model(), weights)
    StagedSwap(drafter, new, runtime_weights(drafter).in_host_memory()).commit()


def reload_weights(worker: Any, weights: dict[str, Any]) -> None:
    """As vLLM does when a trainer sends weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    drafter = worker.get_draft_model()
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(drafter)
        drafter.load_weights(weights.items())
        draft_config = worker.vllm_config.speculative_config.draft_model_config
        finalize_layerwise_reload(drafter, draft_config)


@pytest.mark.parametrize("update", [swap_weights, reload_weights])
def test_drafts_follow_the_weights_there_and_back(
    llm: Any, model: PreTrainedModel, drafters: list[Path], update: Any
) -> None:
    target = Target(model, CONFIG.target_layer_ids)
    texts, kept_drafts = [], []
    for serving in (0, 1, 0):
        if texts:  # the engine has started with the first
            weights = load_file(drafters[serving] / "model.safetensors")
            llm.collective_rpc(update, args=(weights,))
        text, blocks, lengths = drafted(llm)
        assert blocks == reference_drafts(target, load_drafter(drafters[serving]), text, lengths, K)
        texts.append(text)
        kept_drafts.append(blocks)
    assert texts[0] == texts[1] == texts[2]
    assert kept_drafts[0] == kept_drafts[2] != kept_drafts[1]


@pytest.mark.parametrize("fault", ["missing", "nan"])
def test_incomplete_or_nan_weights_are_refused(llm: Any, drafters: list[Path], fault: str) -> None:
    weights = load_file(drafters[1] / "model.safetensors")
    name = "layers.2.self_attn.k_proj.weight"
    if fault == "missing":
        del weights[name]
    else:
        weights[name][0, 0] = torch.nan
    drafter = llm.collective_rpc(_drafter_of)[0]
    with pytest.raises(CheckpointError, match=name):
        drafter.load_weights(weights.items())


def _drafter_of(worker: Any) -> Any:
    return worker.get_draft_model()
