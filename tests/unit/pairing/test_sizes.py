"""Sizes of targets and of drafters for them, for published configs of many families."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3Config

from leadout.dflash.config import DrafterConfig, LayerAttention, Rope
from leadout.dflash.drafter import Drafter
from leadout.pairing.sizes import DraftShape, shape_for, sizes_from_config
from support.target_configs import CONFIGS

# Billions of weights by the model cards: all, and those that a token passes through.
PUBLISHED = {
    "SmolLM2-135M": (0.1345, 0.1345),
    "Qwen2.5-Coder-1.5B": (1.54, 1.54),
    "Qwen3-8B": (8.19, 7.57),
    "Llama-3.3-70B": (70.6, 69.5),
    "Llama-2-7B": (6.74, 6.61),
    "Phi-3-mini": (3.82, 3.72),
    "Gemma-2-9b": (9.24, 9.24),
    "Gemma-3-1b": (1.0, 1.0),
    "Mixtral-8x7B": (46.7, 12.9),
    "OLMoE-1B-7B": (6.92, 1.2),  # without the embedding
    "Qwen3-32B": (32.8, 32.8),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-235B-A22B": (235, 22),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
    "GLM-4.5-Air": (106, 12),
    "MiniMax-M2": (229, 10),
    "DeepSeek-V2-Lite": (15.7, 2.4),
    "DeepSeek-V3": (671, 37),
    "Kimi-K2": (1026, 32),
}

SHAPES = {
    "SmolLM2-135M": DraftShape(576, 1536, 9, 3, 64),
    "Qwen2.5-Coder-1.5B": DraftShape(1536, 8960, 12, 2, 128),
    "Qwen3-8B": DraftShape(4096, 12288, 32, 8, 128),  # as published
    "Llama-3.3-70B": DraftShape(8192, 28672, 64, 8, 128),
    "Llama-2-7B": DraftShape(4096, 11008, 32, 8, 128),  # the target has 32 KV heads
    "Phi-3-mini": DraftShape(3072, 8192, 32, 8, 96),
    "Gemma-2-9b": DraftShape(3584, 14336, 16, 8, 256),
    "Gemma-3-1b": DraftShape(1152, 6912, 4, 1, 256),
    "Mixtral-8x7B": DraftShape(4096, 12288, 32, 8, 128),
    "OLMoE-1B-7B": DraftShape(2048, 6144, 16, 8, 128),
    "Qwen3-32B": DraftShape(5120, 25600, 64, 8, 128),
    "Qwen3-30B-A3B": DraftShape(2048, 6144, 32, 4, 128),
    "Qwen3-235B-A22B": DraftShape(4096, 12288, 64, 4, 128),
    "gpt-oss-20b": DraftShape(2880, 8640, 64, 8, 64),
    "gpt-oss-120b": DraftShape(2880, 8640, 64, 8, 64),
    "GLM-4.5-Air": DraftShape(4096, 10944, 96, 8, 128),
    "MiniMax-M2": DraftShape(3072, 9216, 48, 8, 128),
    "DeepSeek-V2-Lite": DraftShape(2048, 10944, 16, 8, 128),
    "DeepSeek-V3": DraftShape(7168, 18432, 64, 8, 128),
    "Kimi-K2": DraftShape(7168, 18432, 64, 8, 128),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_counted_as_published(name: str) -> None:
    sizes = sizes_from_config(CONFIGS[name], name)
    whole, active = PUBLISHED[name]
    assert sizes.parameters / 1e9 == pytest.approx(whole, rel=0.02)
    assert sizes.active_parameters / 1e9 == pytest.approx(active, rel=0.1)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_shape_of_a_drafter(name: str) -> None:
    shape = shape_for(sizes_from_config(CONFIGS[name], name))
    assert shape == SHAPES[name]
    assert shape.num_heads % shape.num_kv_heads == 0
    # Never more than 8 KV heads: 20 KB per token of context with 5 layers of 128.
    assert shape.kv_bytes_per_token(5) <= 5 * 2 * 8 * max(128, shape.head_dim) * 2


def test_a_drafter_for_latent_attention_has_a_small_context() -> None:
    shape = shape_for(sizes_from_config(CONFIGS["DeepSeek-V3"], "DeepSeek-V3"))
    assert shape.kv_bytes_per_token(5) == 20_480


@pytest.mark.parametrize(
    ("hidden", "heads", "expected"),
    [
        (1000, 12, (16, 64)),  # 83 numbers per head, which no kernel takes
        (3000, 7, (8, 128)),  # 428
        (2048, 4, (4, 128)),  # 512
        (4096, 32, (32, 128)),
        (2560, 32, (32, 80)),
    ],
)
def test_heads_of_an_odd_size_are_replaced(
    hidden: int, heads: int, expected: tuple[int, int]
) -> None:
    config = {"hidden_size": hidden, "num_hidden_layers": 4, "vocab_size": 100}
    shape = shape_for(sizes_from_config(config | {"num_attention_heads": heads}, "odd"))
    assert (shape.num_heads, shape.head_dim) == expected


def test_sizes_agree_with_transformers() -> None:
    common = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500}
    for config in (
        Qwen3Config(head_dim=32, **common, **heads),
        MixtralConfig(num_local_experts=4, **common, **heads),
    ):
        auto: type = AutoModelForCausalLM
        model = auto.from_config(config)  # type: ignore[attr-defined]
        exact = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        counted = sizes_from_config(config.to_dict(), "tiny").parameters
        assert counted == exact + config.hidden_size  # the final norm


def test_a_drafters_weights_are_counted_exactly() -> None:
    shape = DraftShape(64, 160, 4, 2, 32)
    config = DrafterConfig(
        hidden_size=64,
        intermediate_size=160,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        layers=(LayerAttention(),) * 3,
        rope=Rope(1e4),
        max_positions=512,
        rms_norm_eps=1e-6,
        target_layer_ids=(1, 2, 3, 4),
        target_num_layers=6,
        vocab_size=500,
        mask_token_id=9,
        block_size=5,
    )
    exact = sum(p.numel() for p in Drafter(config).parameters())
    assert shape.parameters(3, taps=4) == exact
