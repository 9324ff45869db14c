"""The libraries whose formats these are compute from our files what Leadout computes."""

from __future__ import annotations

import importlib.util
import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dflash.model as zlab_model
import pytest
import speculators.models.dflash as speculators_dflash
import torch
from torch import Tensor

from leadout.checkpoints import load_drafter, write_checkpoint
from leadout.dflash.config import DrafterConfig, LayerAttention, LinearScaling, Rope, Yarn
from leadout.dflash.drafter import Drafter
from leadout.dflash.mask import decode_masks
from support.drafters import FULL, MINI, SLIDING, random_weights
from support.models import TINY_VOCAB, tiny_qwen3

CONTEXT = 11  # longer than the window of SLIDING
BIDIRECTIONAL = LayerAttention(window=6, causal=False)


def our_hidden(drafter: Drafter, states: Tensor, block: Tensor) -> Tensor:
    """The drafter's output for a block that follows a context of tapped states."""
    past, length = states.shape[1], block.shape[1]
    positions = torch.arange(past + length)[None]
    context, own = positions[:, :past], positions[:, past:]
    masks = decode_masks(drafter.config.layers, own, context, torch.ones_like(context).bool())
    features = drafter.context_features(states)
    with torch.no_grad():
        return drafter(block, own, drafter.context_kv(features, context), masks)


def inputs_for(config: DrafterConfig, context: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    taps = len(config.target_layer_ids) * config.context_size
    states = torch.randn(1, context, taps, generator=generator)
    return states, torch.randn(1, config.block_size, config.hidden_size, generator=generator)


ZLAB = {
    "full": MINI,
    "sliding": replace(MINI, layers=(SLIDING, SLIDING)),
    "mixed": replace(MINI, layers=(SLIDING, FULL)),
    "sliding, bidirectional": replace(MINI, layers=(BIDIRECTIONAL, BIDIRECTIONAL)),
    "full, causal": replace(MINI, layers=(LayerAttention(causal=True),) * 2),
    "yarn": replace(MINI, rope=Rope(1e4, Yarn(8.0, 32, mscale=1.0, mscale_all_dim=0.5))),
    "linear": replace(MINI, rope=Rope(1e4, LinearScaling(4.0))),
    "biases": replace(MINI, attention_bias=True, rms_norm_eps=1e-2),
}


def zlab_hidden(folder: Path, states: Tensor, block: Tensor) -> Tensor:
    draft = zlab_model.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    positions = torch.arange(states.shape[1] + block.shape[1])[None]
    with torch.no_grad():
        return draft(position_ids=positions, noise_embedding=block, target_hidden=states)


@pytest.mark.parametrize("config", ZLAB.values(), ids=ZLAB.keys())
def test_zlabs_class_computes_the_same(config: DrafterConfig, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "drafter", random_weights(config), config, "zlab")
    states, block = inputs_for(config, CONTEXT)
    theirs = zlab_hidden(tmp_path / "drafter", states, block)
    ours = our_hidden(load_drafter(tmp_path / "drafter"), states, block)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_comparison_sees_a_lost_flag(tmp_path: Path) -> None:
    """Each attention above computes something else, so none of them passes for another."""
    states, block = inputs_for(MINI, CONTEXT)
    outputs = []
    for name in ("full", "sliding", "mixed", "sliding, bidirectional", "full, causal"):
        config = ZLAB[name]
        write_checkpoint(tmp_path / name, random_weights(config), config, "zlab")
        outputs.append(zlab_hidden(tmp_path / name, states, block))
    for i, one in enumerate(outputs):
        for other in outputs[i + 1 :]:
            assert (one - other).abs().max() > 1e-2


WIDE = replace(MINI, hidden_size=64, vocab_size=TINY_VOCAB, mask_token_id=300)
# speculators counts a window from the anchor, not from each slot, so this one reaches everything.
FAR = 64

SPECULATORS = {
    "full": WIDE,
    "sliding": replace(WIDE, layers=(LayerAttention(FAR, causal=True),) * 2),
    "mixed, bidirectional": replace(WIDE, layers=(LayerAttention(FAR), FULL)),
    "yarn": replace(WIDE, rope=Rope(1e4, Yarn(8.0, 32))),
    "reduced vocabulary": replace(
        WIDE, own_embedding=True, own_head=True, draft_vocab_size=TINY_VOCAB // 4
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_qwen3().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("config", SPECULATORS.values(), ids=SPECULATORS.keys())
def test_speculators_loads_and_computes_the_same(
    config: DrafterConfig, target: Path, tmp_path: Path
) -> None:
    embedding = tiny_qwen3().get_input_embeddings().weight.detach()
    weights = random_weights(config)
    if config.own_embedding:  # speculators always takes the target's
        weights["embed_tokens.weight"] = embedding
    folder = tmp_path / "drafter"
    write_checkpoint(folder, weights, config, "speculators", target_name=str(target))

    read = speculators_dflash.DFlashSpeculatorConfig.from_pretrained(folder)
    assert [j - 1 for j in read.aux_hidden_state_layer_ids] == list(config.target_layer_ids)
    assert (read.block_size, read.mask_token_id) == (config.block_size, config.mask_token_id)
    assert read.draft_vocab_size == config.head_rows
    assert read.speculators_config.verifier.name_or_path == str(target)
    assert read.speculators_config.proposal_methods[0].speculative_tokens == 3
    assert read.sample_from_anchor is False

    read.transformer_layer_config._attn_implementation = "eager"
    theirs = speculators_dflash.DFlashDraftModel.from_pretrained(folder, config=read).eval()
    assert all(torch.equal(theirs.state_dict()[name], weights[name]) for name in weights)

    states, _ = inputs_for(config, CONTEXT + 2 * config.block_size)  # no anchors at the end
    tokens = torch.arange(10, 10 + states.shape[1])[None]
    only_anchor = torch.zeros(1, states.shape[1])
    only_anchor[0, CONTEXT] = 1
    with torch.no_grad():
        hidden, logits, *_ = theirs._backbone_forward(
            states,
            tokens,
            only_anchor,
            torch.zeros(1, states.shape[1], config.hidden_size),
            torch.zeros_like(tokens),
            max_anchors=1,
        )
    drafter = load_drafter(folder)
    block = drafter.block_tokens(tokens[:, CONTEXT], config.block_size)
    ours = our_hidden(drafter, states[:, :CONTEXT], drafter.embed(block, embedding))
    torch.testing.assert_close(ours, hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        drafter.logits(ours, tiny_qwen3().lm_head), logits, rtol=1e-4, atol=1e-4
    )


@pytest.fixture(scope="module")
def vllm_update() -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """vLLM's own translation of a speculators config, from its source: vLLM itself stays out."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "transformers_utils" / "configs" / "speculators" / "algos.py"
    return runpy.run_path(str(path))["update_dflash"]


@pytest.mark.parametrize("config", SPECULATORS.values(), ids=SPECULATORS.keys())
def test_vllm_would_serve_it_as_trained(
    config: DrafterConfig,
    vllm_update: Callable[[dict[str, Any], dict[str, Any]], None],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "drafter"
    write_checkpoint(folder, random_weights(config), config, "speculators", target_name="t")
    written = json.loads((folder / "config.json").read_text())
    served = written["transformer_layer_config"]
    vllm_update(written, served)
    section = served["dflash_config"]
    assert section["target_layer_ids"] == list(config.target_layer_ids)
    assert section["mask_token_id"] == config.mask_token_id
    # This one flag decides over every layer in vLLM 0.32.
    assert [section["causal"]] * config.num_layers == [layer.causal for layer in config.layers]
