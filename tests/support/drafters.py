"""Drafters for tests: configs, random weights, checkpoint folders, and edits that damage them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leadout.checkpoints import write_checkpoint
from leadout.dflash.config import DrafterConfig, LayerAttention, Rope
from leadout.dflash.drafter import Drafter

FULL = LayerAttention()
SLIDING = LayerAttention(window=6, causal=True)

SMOLLM2_DRAFTER = DrafterConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    layers=(LayerAttention(), LayerAttention()),
    rope=Rope(theta=100_000.0),
    max_positions=8192,
    rms_norm_eps=1e-5,
    target_layer_ids=(1, 8, 15, 22, 27),
    target_num_layers=30,
    vocab_size=49152,
    mask_token_id=7,
    block_size=8,
)

# For `tiny_llama` and `tiny_qwen3`, which differ in target_num_layers.
TINY_DRAFTER = DrafterConfig(
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    layers=(LayerAttention(), LayerAttention(), LayerAttention()),
    rope=Rope(theta=10_000.0),
    max_positions=512,
    target_layer_ids=(1, 2, 3),
    vocab_size=320,
    mask_token_id=1,
    block_size=5,
)

# The smallest, for tests that read and write files.
MINI = DrafterConfig(
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    layers=(FULL, FULL),
    rope=Rope(theta=10_000.0),
    max_positions=256,
    target_layer_ids=(1, 3),
    target_num_layers=6,
    vocab_size=40,
    mask_token_id=7,
    block_size=4,
)
MINI_REDUCED = replace(MINI, own_embedding=True, own_head=True, draft_vocab_size=10)


def random_drafter(config: DrafterConfig = SMOLLM2_DRAFTER, seed: int = 0) -> Drafter:
    """A drafter with seeded random weights, large enough that drafts depend on the input."""
    torch.manual_seed(seed)
    drafter = Drafter(config)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.05)
        else:  # norm weights that differ between layers, as after training
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return drafter


def write_random_drafter(folder: Path, config: DrafterConfig = SMOLLM2_DRAFTER) -> Path:
    write_checkpoint(folder, random_drafter(config).state_dict(), config, "zlab")
    return folder


def random_weights(
    config: DrafterConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random weights of a drafter; a reduced vocabulary has every fourth target token."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(tensor.shape, generator=generator).mul(0.3).to(dtype)
        for name, tensor in Drafter(config).state_dict().items()
    }
    if config.draft_vocab_size is not None:
        ids = torch.arange(config.draft_vocab_size)
        weights["d2t"] = 4 * ids - ids
    return weights


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    path.unlink()
    save_file(weights, path, metadata={"format": "pt"})


def shard(folder: Path) -> None:
    """Split model.safetensors in two, with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    index = {}
    for part, chosen in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({name: weights[name] for name in chosen}, folder / file)
        index |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def write_hollow_weights(path: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """A sparse safetensors file of full size, which takes no space on disk."""
    bytes_of = {"BF16": 2, "I64": 8, "BOOL": 1}
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + torch.Size(shape).numel() * bytes_of[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
