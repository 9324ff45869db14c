"""Models for which no drafter can be trained are refused by their config, with a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leadout.dflash.config import Rope
from leadout.dflash.target import UnsupportedTargetError
from leadout.pairing.trainable import REFUSALS, drafter_rope, refusal, require_trainable
from support.target_configs import CONFIGS

SIZES = {"hidden_size": 64, "num_hidden_layers": 6, "vocab_size": 320, "rope_theta": 1e4}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("encoder-decoder", {"is_encoder_decoder": True, "d_model": 512, "vocab_size": 32128}),
    (
        "encoder-decoder",
        {"architectures": ["WhisperForConditionalGeneration"], "encoder_layers": 4},
    ),
    ("multimodal", {"text_config": SIZES, "vision_config": {"hidden_size": 8}}),
    ("multimodal", {"thinker_config": {"text_config": SIZES}}),
    ("multimodal", {**SIZES, "audio_config": {}}),
    ("no-generation", {**SIZES, "architectures": ["Qwen3ForSequenceClassification"]}),
    ("no-attention", {**SIZES, "model_type": "mamba2"}),
    ("no-attention", {**SIZES, "layer_types": ["mamba", "linear_attention"]}),
    ("mrope", {**SIZES, "rope_parameters": MROPE}),
    ("no-rope", {name: value for name, value in SIZES.items() if name != "rope_theta"}),
    ("no-rope", {**SIZES, "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}),
]


@pytest.mark.parametrize(("name", "config"), UNSUPPORTED)
def test_unsupported_targets_are_refused(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = refusal(config)
    assert found is not None
    assert found.name == name
    with pytest.raises(UnsupportedTargetError, match="my/model cannot be the target of a new dra"):
        require_trainable(tmp_path, "my/model")


def test_every_refusal_has_an_example() -> None:
    assert {refusal.name for refusal in REFUSALS} == {name for name, _ in UNSUPPORTED}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_text_models_are_not_refused(name: str) -> None:
    assert refusal(CONFIGS[name]) is None


def test_hybrids_are_left_to_the_engine() -> None:
    assert refusal({**SIZES, "layer_types": ["linear_attention", "full_attention"]}) is None
    assert refusal({**SIZES, "layer_types": ["mamba", "attention"]}) is None


def test_an_existing_drafter_needs_less() -> None:
    multimodal = {"text_config": SIZES, "vision_config": {}}
    assert refusal(multimodal, new=False) is None
    found = refusal({"is_encoder_decoder": True}, new=False)
    assert found is not None


def test_a_new_drafter_rotates_whole_heads_like_full_attention() -> None:
    assert drafter_rope(CONFIGS["GLM-4.5-Air"], "glm") == Rope(1e6)
    assert drafter_rope(CONFIGS["Gemma-3-1b"], "gemma") == Rope(1e6)
    different = {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    assert drafter_rope({**SIZES, **different}, "hybrid") == Rope(1e6)
