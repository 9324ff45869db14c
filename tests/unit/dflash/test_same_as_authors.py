"""Our drafter computes what the authors' own code computes, on the same weights.

`dflash.model.DFlashDraftModel` is driven the way the authors' decoding loop drives it: the newly
committed states go in with each block, and its cache is cropped back to the committed tokens.
Ours gets every state of the block, accepted or not, and the number that was committed.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel, _crop_to, _make_cache
from torch import Tensor
from transformers import Qwen3Config

from leadout.dflash.cache import ContextCache
from leadout.dflash.config import DrafterConfig, LayerAttention, LinearScaling, Rope, Yarn
from leadout.dflash.drafter import Drafter
from leadout.dflash.mask import decode_masks

FULL = LayerAttention()
CAUSAL_WINDOW = LayerAttention(window=6, causal=True)
OPEN_WINDOW = LayerAttention(window=6)


@dataclass(frozen=True)
class Case:
    """One configuration, ours, and what the authors' configuration adds to Qwen3's."""

    layers: tuple[LayerAttention, ...]
    theirs: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1.5e5,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
}
KIMI_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}

CASES = {
    "one layer": Case((FULL,)),
    "two layers": Case((FULL,) * 2),
    "five layers": Case((FULL,) * 5),
    "one key head for all": Case((FULL,) * 2, {"num_key_value_heads": 1}, {"num_kv_heads": 1}),
    "as many key heads": Case((FULL,) * 2, {"num_key_value_heads": 4}, {"num_kv_heads": 4}),
    "heads wider than the model": Case((FULL,) * 2, {"head_dim": 24}, {"head_dim": 24}),
    "sliding, causal by default": Case((CAUSAL_WINDOW,) * 2),
    "sliding, both ways": Case((OPEN_WINDOW,) * 2, {"is_causal": False}),
    "window smaller than the block": Case(
        (LayerAttention(window=3),) * 2, {"is_causal": False, "sliding_window": 3}
    ),
    "four sliding, one full": Case((CAUSAL_WINDOW,) * 4 + (FULL,)),
    "full, causal": Case((LayerAttention(causal=True),) * 2, {"is_causal": True}),
    "attention bias": Case((FULL,) * 2, {"attention_bias": True}, {"attention_bias": True}),
    "yarn": Case((FULL,) * 2, {"rope_parameters": YARN}, {"rope": Rope(1.5e5, Yarn(32.0, 16))}),
    "yarn with mscale, mixed layers": Case(
        (CAUSAL_WINDOW, FULL),
        {"rope_parameters": KIMI_YARN},
        {"rope": Rope(1.5e5, Yarn(32.0, 16, mscale=1.0, mscale_all_dim=0.5))},
    ),
    "linear positions": Case(
        (FULL,),
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"rope": Rope(1e4, LinearScaling(4.0))},
    ),
    "coarse norms": Case((FULL,) * 2, {"rms_norm_eps": 1e-2}, {"rms_norm_eps": 1e-2}),
}


def authors_model(config: DrafterConfig, changes: dict[str, Any]) -> DFlashDraftModel:
    slides = [layer.window is not None for layer in config.layers]
    fields: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
        "use_sliding_window": any(slides),
        "sliding_window": 6,
        "num_target_layers": 8,
        "block_size": config.block_size,
        "dflash_config": {
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
        },
    }
    return DFlashDraftModel(Qwen3Config(**(fields | changes))).eval()


def our_block(drafter: Drafter, cache: ContextCache, embeddings: Tensor) -> Tensor:
    start = cache.lengths[:, None]
    positions = start + torch.arange(embeddings.shape[1])
    view = cache.view()
    masks = decode_masks(drafter.config.layers, positions, view.positions, view.valid)
    return drafter(embeddings, positions, view.layers, masks)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_every_block_of_a_generation_agrees(name: str, make_drafter: Any) -> None:
    case = CASES[name]
    ours = make_drafter(layers=case.layers, **case.ours)
    theirs = authors_model(ours.config, case.theirs)
    theirs.load_state_dict(ours.state_dict(), strict=True)

    generator = torch.Generator().manual_seed(1)
    block = ours.config.block_size
    taps = len(ours.config.target_layer_ids) * ours.config.hidden_size
    their_cache = _make_cache(theirs.config)
    our_cache = ContextCache(ours.config, 1, torch.device("cpu"), torch.float32)

    committed = torch.randn(1, 11, taps, generator=generator)
    our_cache.append(ours, committed, torch.tensor([11]))
    start = 11
    for produced in (1, block, 3, 2, block, 1):
        embeddings = torch.randn(1, block, ours.config.hidden_size, generator=generator)
        expected = theirs(
            target_hidden=committed,
            noise_embedding=embeddings,
            position_ids=torch.arange(start - committed.shape[1], start + block)[None],
            past_key_values=their_cache,
            use_cache=True,
        )
        _crop_to(their_cache, start)
        found = our_block(ours, our_cache, embeddings)
        assert 0.3 < expected.std() < 3.0
        assert (found - expected).abs().max() < 1e-5, f"block at position {start}"

        verified = torch.randn(1, block, taps, generator=generator)
        our_cache.append(ours, verified, torch.tensor([produced]))
        committed = verified[:, :produced]
        start += produced


def test_logits_agree_with_scaled_and_capped_output(make_drafter: Any) -> None:
    ours = make_drafter(logit_multiplier=0.196, logit_softcap=2.0)
    theirs = authors_model(
        ours.config, {"output_multiplier": 0.196, "final_logit_softcapping": 2.0}
    )
    head = torch.nn.Linear(32, 61)
    hidden = 10 * torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours.logits(hidden, head), theirs.compute_logits(hidden, head))


@torch.no_grad()
def test_bfloat16_rounds_where_the_authors_round(make_drafter: Any) -> None:
    ours = make_drafter().to(torch.bfloat16)
    theirs = authors_model(ours.config, {}).to(torch.bfloat16)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(1, 300, 96, generator=generator).to(torch.bfloat16)
    embeddings = torch.randn(1, 5, 32, generator=generator).to(torch.bfloat16)
    cache = ContextCache(ours.config, 1, torch.device("cpu"), torch.bfloat16)
    cache.append(ours, states, torch.tensor([300]))
    expected = theirs(
        target_hidden=states, noise_embedding=embeddings, position_ids=torch.arange(305)[None]
    )
    # One unit in the last place of bfloat16 at this size is 0.016.
    assert (our_block(ours, cache, embeddings) - expected).abs().max() < 0.05
