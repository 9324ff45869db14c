"""Rotary embedding agrees with transformers for every kind of scaling."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from leadout.dflash.config import LinearScaling, Llama3Scaling, Rope, Yarn
from leadout.dflash.rope import attention_factor, inverse_frequencies, rotate, rotation_at

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

SCALED = {
    "linear": (
        Rope(1e4, LinearScaling(4.0)),
        {"rope_type": "linear", "factor": 4.0},
    ),
    "linear, half the head": (
        Rope(1e6, LinearScaling(2.5), fraction=0.5),
        {"rope_type": "linear", "factor": 2.5, "partial_rotary_factor": 0.5},
    ),
    "llama3": (
        Rope(5e5, Llama3Scaling(**LLAMA3, original_max_positions=8192)),
        {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 8192},
    ),
    "llama3, short context": (
        Rope(1e4, Llama3Scaling(**LLAMA3, original_max_positions=256)),
        {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 256},
    ),
    "yarn": (
        Rope(1.5e5, Yarn(32.0, 4096)),
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    ),
    "yarn, not truncated": (
        Rope(1.5e5, Yarn(32.0, 4096, truncate=False)),
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    ),
    "yarn, both mscales": (
        Rope(5e4, Yarn(64.0, 4096, mscale=1.0, mscale_all_dim=0.7)),
        {
            "rope_type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    ),
    "yarn, one mscale": (
        Rope(5e4, Yarn(64.0, 4096, mscale=0.5)),
        {
            "rope_type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.5,
        },
    ),
    "yarn, factor given": (
        Rope(5e4, Yarn(4.0, 4096, attention_factor=1.3, beta_fast=16.0, beta_slow=2.0)),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
            "attention_factor": 1.3,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
    ),
    "yarn, quarter of the head": (
        Rope(1e4, Yarn(4.0, 2048), fraction=0.25),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "partial_rotary_factor": 0.25,
        },
    ),
    "yarn, ramp past the last pair": (
        Rope(500.0, Yarn(8.0, 4096)),
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096},
    ),
    "yarn, everything turns often": (
        Rope(10.0, Yarn(4.0, 65536)),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 65536},
    ),
}


def reference_config(theta: float, parameters: dict[str, Any]) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=131_072,
        rope_parameters={"rope_theta": theta, **parameters},
    )


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_frequencies_equal_transformers(kind: str) -> None:
    rope, parameters = SCALED[kind]
    expected, expected_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
        reference_config(rope.theta, parameters), torch.device("cpu")
    )
    torch.testing.assert_close(inverse_frequencies(rope, 64), expected, rtol=2e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(expected_factor)


def test_default_frequencies_equal_transformers() -> None:
    reference = Qwen3RotaryEmbedding(reference_config(1e6, {"rope_type": "default"}))
    assert torch.equal(inverse_frequencies(Rope(1e6), 64), reference.inv_freq)
    assert attention_factor(Rope(1e6)) == 1.0


@pytest.mark.parametrize("kind", ["default", "yarn", "llama3"])
def test_rotation_equals_transformers_at_far_positions(kind: str) -> None:
    rope, parameters = SCALED.get(kind, (Rope(1e6), {"rope_type": "default"}))
    positions = torch.tensor([[0, 1, 2, 77], [5, 4096, 40_000, 100_000]])
    heads = torch.randn(2, 3, 4, 64, generator=torch.Generator().manual_seed(0))
    cos, sin = Qwen3RotaryEmbedding(reference_config(rope.theta, parameters))(heads, positions)
    expected, _ = apply_rotary_pos_emb(heads, heads, cos, sin)
    torch.testing.assert_close(
        rotate(heads, rotation_at(rope, 64, positions)), expected, rtol=0, atol=1e-5
    )


def test_dimensions_past_the_fraction_are_not_turned() -> None:
    heads = torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[3, 4, 5]])
    turned = rotate(heads, rotation_at(Rope(1e4, fraction=0.5), 16, positions))
    assert torch.equal(turned[..., 8:], heads[..., 8:])
    # The rotated half is a head of its own width.
    alone = rotate(heads[..., :8], rotation_at(Rope(1e4), 8, positions))
    assert torch.equal(turned[..., :8], alone)
    assert not torch.allclose(turned[..., :8], heads[..., :8])


def test_scores_depend_on_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 32, generator=generator)
    rope = Rope(1e4)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        turned_query = rotate(query, rotation_at(rope, 32, torch.tensor([[query_position]])))
        turned_key = rotate(key, rotation_at(rope, 32, torch.tensor([[key_position]])))
        return (turned_query * turned_key).sum()

    torch.testing.assert_close(score(9, 4), score(109, 104), rtol=0, atol=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


def test_angles_keep_float32_when_heads_are_bfloat16() -> None:
    heads = torch.ones(1, 1, 1, 8, dtype=torch.bfloat16)
    rotation = rotation_at(Rope(1e4), 8, torch.tensor([[100_001]]))
    assert rotation.cos.dtype == torch.float32
    assert rotate(heads, rotation).dtype == torch.bfloat16
    torch.testing.assert_close(
        rotation.cos[0, 0, 0, 0].double(), torch.tensor(100_001.0).double().cos(), atol=1e-5, rtol=0
    )
