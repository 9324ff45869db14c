"""A drafter trained with a window is read by vLLM with the attention that it was trained with."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.models.qwen3_dflash import _resolve_layer_attention

from leadout.checkpoints import read_checkpoint, write_checkpoint
from leadout.dflash.config import LayerAttention
from leadout.train.init import new_config, new_drafter
from support.tiny_data import write_predictable_target


@pytest.mark.parametrize("window", [None, 7])
def test_vllm_reads_the_trained_window(tmp_path: Path, window: int | None) -> None:
    target = write_predictable_target(tmp_path / "target")
    config = new_config(
        target,
        layers=2,
        block_size=5,
        target_layer_ids=(1, 3),
        mask_token_id=7,
        window=window,
    )
    assert config.layers == (LayerAttention(window, causal=window is not None),) * 2
    weights: dict[str, torch.Tensor] = dict(new_drafter(config, 0).state_dict())
    write_checkpoint(tmp_path / "drafter", weights, config, "zlab")
    assert read_checkpoint(tmp_path / "drafter").config.layers == config.layers
    written = SimpleNamespace(**json.loads((tmp_path / "drafter" / "config.json").read_text()))
    for number in range(2):
        assert _resolve_layer_attention(written, number) == (window, window is not None)
