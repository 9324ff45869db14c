"""What is published, read as its authors meant it - or refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from leadout.checkpoints import Checkpoint, UnsupportedCheckpointError, read_checkpoint
from leadout.dflash.config import LayerAttention, Rope, Yarn
from support.drafters import write_hollow_weights

PUBLISHED = Path(__file__).parent / "published"
FULL = LayerAttention()


def published_tensors(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors such a checkpoint has, by the published layout."""
    decoder = config.get("transformer_layer_config", config)
    width, inner = decoder["hidden_size"], decoder["intermediate_size"]
    head_dim = decoder["head_dim"]
    queries = decoder["num_attention_heads"] * head_dim
    keys = decoder["num_key_value_heads"] * head_dim
    taps = (
        config.get("aux_hidden_state_layer_ids")
        or config.get("dflash_config", config)["target_layer_ids"]
    )
    shapes = {"fc.weight": (width, len(taps) * width)}
    shapes |= {"hidden_norm.weight": (width,), "norm.weight": (width,)}
    for layer in range(decoder["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (queries, width),
            f"{prefix}self_attn.k_proj.weight": (keys, width),
            f"{prefix}self_attn.v_proj.weight": (keys, width),
            f"{prefix}self_attn.o_proj.weight": (width, queries),
            f"{prefix}self_attn.q_norm.weight": (head_dim,),
            f"{prefix}self_attn.k_norm.weight": (head_dim,),
            f"{prefix}mlp.gate_proj.weight": (inner, width),
            f"{prefix}mlp.up_proj.weight": (inner, width),
            f"{prefix}mlp.down_proj.weight": (width, inner),
            f"{prefix}input_layernorm.weight": (width,),
            f"{prefix}post_attention_layernorm.weight": (width,),
        }
    tensors = {name: ("BF16", shape) for name, shape in shapes.items()}
    if "draft_vocab_size" in config and "speculators_model_type" in config:
        rows, drafted = decoder["vocab_size"], config["draft_vocab_size"]
        tensors |= {
            "embed_tokens.weight": ("BF16", (rows, width)),
            "lm_head.weight": ("BF16", (drafted, width)),
            "d2t": ("I64", (drafted,)),
            "t2d": ("BOOL", (rows,)),
        }
    return tensors


def published_checkpoint(name: str, tmp_path: Path) -> Path:
    shutil.copy(PUBLISHED / f"{name}.json", tmp_path / "config.json")
    config = json.loads((tmp_path / "config.json").read_text())
    write_hollow_weights(tmp_path / "model.safetensors", published_tensors(config))
    return tmp_path


def read_published(name: str, tmp_path: Path) -> Checkpoint:
    return read_checkpoint(published_checkpoint(name, tmp_path))


@pytest.mark.parametrize(
    ("name", "layer_ids", "block_size", "mask_token", "vocabulary"),
    [
        ("qwen3-4b-b16", (1, 9, 17, 25, 33), 16, 151669, 151936),
        ("gpt-oss-20b", (1, 6, 11, 16, 21), 8, 200000, 201088),
        ("qwen3.6-27b", (1, 16, 31, 46, 61), 16, 248070, 248320),
        ("qwen3.5-122b-a10b", (1, 7, 14, 20, 26, 32, 39, 45), 16, 248077, 248320),
        ("kimi-k2.5", (1, 12, 24, 35, 47, 58), 8, 163838, 163840),
        ("redhat-qwen3-8b", (1, 9, 17, 25, 33), 8, 151669, 151936),
    ],
)
def test_wiring(
    name: str,
    layer_ids: tuple[int, ...],
    block_size: int,
    mask_token: int,
    vocabulary: int,
    tmp_path: Path,
) -> None:
    config = read_published(name, tmp_path).config
    assert config.target_layer_ids == layer_ids
    assert config.block_size == block_size
    assert config.mask_token_id == mask_token
    assert config.vocab_size == vocabulary


@pytest.mark.parametrize(
    ("name", "layers", "rope"),
    [
        ("qwen3-4b-b16", (FULL,) * 5, Rope(1e6)),
        (
            "gpt-oss-20b",
            (FULL,) * 8,
            Rope(150000.0, Yarn(32.0, 4096, truncate=False)),
        ),
        ("qwen3.6-27b", (LayerAttention(2048, causal=True),) * 4 + (FULL,), Rope(1e7)),
        # use_sliding_window without layer_types: Qwen3Config lets layers from 28 on slide.
        ("qwen3.5-122b-a10b", (FULL,) * 6, Rope(1e7)),
        ("kimi-k2.5", (FULL,) * 6, Rope(50000.0, Yarn(64.0, 4096, mscale=1.0, mscale_all_dim=1.0))),
        ("redhat-qwen3-8b", (FULL,) * 5, Rope(1e6)),
    ],
)
def test_attention(
    name: str, layers: tuple[LayerAttention, ...], rope: Rope, tmp_path: Path
) -> None:
    config = read_published(name, tmp_path).config
    assert config.layers == layers
    assert config.rope == rope


def test_shape_of_a_drafter_whose_heads_are_wider_than_itself(tmp_path: Path) -> None:
    config = read_published("gpt-oss-20b", tmp_path).config
    assert (config.num_heads, config.head_dim, config.hidden_size) == (64, 64, 2880)
    assert config.target_num_layers == 24


def test_speculators_extras(tmp_path: Path) -> None:
    checkpoint = read_published("redhat-qwen3-8b", tmp_path)
    assert checkpoint.format == "speculators"
    assert checkpoint.target_name == "Qwen/Qwen3-8B"
    assert checkpoint.draft_tokens == 7
    assert checkpoint.config.draft_vocab_size == 32000
    assert checkpoint.config.own_embedding
    assert checkpoint.config.own_head
    assert not checkpoint.notes


def test_a_window_that_readers_would_lose_is_noted(tmp_path: Path) -> None:
    notes = read_published("qwen3.6-27b", tmp_path).notes
    assert any("use_sliding_window" in note and "vLLM refuses to start" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mimo-v2.5-pro", "attention sinks"),
        ("qwen3.8-27b-dflash2", "DFlash 2"),
        ("redhat-deepseek-v4-flash", "hyper-connections"),
        ("laguna-s-2.1", "Laguna"),
        ("muse-glimmer-30b-assistant", "Muse Glimmer"),
    ],
)
def test_relatives_are_refused_by_name(name: str, reason: str, tmp_path: Path) -> None:
    folder = published_checkpoint(name, tmp_path)
    with pytest.raises(UnsupportedCheckpointError, match=reason):
        read_checkpoint(folder)


def test_mimo_without_its_sinks_and_scale_slides_without_being_causal(tmp_path: Path) -> None:
    folder = published_checkpoint("mimo-v2.5-pro", tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name in ("attention_value_scale", "attention_sink_bias"):
        del config["dflash_config"][name]
    path.write_text(json.dumps(config))
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config.layers == (LayerAttention(1024, causal=False),) * 5
    assert checkpoint.config.target_layer_ids == (0, 15, 31, 47, 69)
    assert checkpoint.config.rope == Rope(10_000.0, fraction=0.5)
    assert any("use_swa" in note for note in checkpoint.notes)
    assert checkpoint.kept["backbone_rotary_base"] == 5_000_000
