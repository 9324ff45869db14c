"""Drafters of the tests: random weights in the files that vLLM reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def random_drafter_for_smollm2(folder: Path, seed: int = 0) -> Path:
    """A seeded random z-lab drafter, block size 8: right only by chance, so all is rejected."""
    hidden, inner, heads, kv_heads, head_dim, layers = 576, 1536, 9, 3, 64, 2
    taps = [1, 8, 15, 22, 27]
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "block_size": 8,
        "num_target_layers": 30,
        "layer_types": ["full_attention"] * layers,
        "dtype": "float32",
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": taps},
    }
    shapes = {"fc.weight": (hidden, len(taps) * hidden)}
    for layer in range(layers):
        shapes |= {
            f"layers.{layer}.self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"layers.{layer}.self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"layers.{layer}.self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"layers.{layer}.self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"layers.{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{layer}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    norms = {"norm.weight": hidden, "hidden_norm.weight": hidden}
    for layer in range(layers):
        norms |= {
            f"layers.{layer}.input_layernorm.weight": hidden,
            f"layers.{layer}.post_attention_layernorm.weight": hidden,
            f"layers.{layer}.self_attn.q_norm.weight": head_dim,
            f"layers.{layer}.self_attn.k_norm.weight": head_dim,
        }
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()
    }
    tensors |= {name: torch.ones(size) for name, size in norms.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
