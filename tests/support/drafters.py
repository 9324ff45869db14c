"""Drafters of the tests."""

from __future__ import annotations

from pathlib import Path

import torch

from leadout.checkpoints import write_checkpoint
from leadout.dflash.config import DrafterConfig, LayerAttention, Rope
from leadout.dflash.drafter import Drafter

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
"""For `tiny_llama` and `tiny_qwen3`, once it is told how many layers they have."""


def random_drafter(config: DrafterConfig = SMOLLM2_DRAFTER, seed: int = 0) -> Drafter:
    """Seeded random weights, wide enough that drafts depend on them: right only by chance."""
    torch.manual_seed(seed)
    drafter = Drafter(config)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.05)
        else:  # norms that differ from layer to layer, as trained ones do
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return drafter


def write_random_drafter(folder: Path, config: DrafterConfig = SMOLLM2_DRAFTER) -> Path:
    write_checkpoint(folder, random_drafter(config).state_dict(), config, "zlab")
    return folder
