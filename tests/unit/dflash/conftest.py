"""Small drafters with random weights, scaled so that activations stay around one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from leadout.dflash.config import DrafterConfig, LayerAttention, Rope
from leadout.dflash.drafter import Drafter

MakeConfig = Callable[..., DrafterConfig]
MakeDrafter = Callable[..., Drafter]


@pytest.fixture
def make_config() -> MakeConfig:
    def make(**changes: Any) -> DrafterConfig:
        fields: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "layers": (LayerAttention(), LayerAttention()),
            "rope": Rope(theta=10_000.0),
            "max_positions": 512,
            "target_layer_ids": (1, 3, 4),
            "vocab_size": 61,
            "mask_token_id": 60,
            "block_size": 5,
        }
        return DrafterConfig(**(fields | changes))

    return make


@pytest.fixture
def make_drafter(make_config: MakeConfig) -> MakeDrafter:
    def make(seed: int = 0, **changes: Any) -> Drafter:
        torch.manual_seed(seed)
        drafter = Drafter(make_config(**changes))
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            else:
                nn.init.uniform_(parameter, 0.5, 1.5)
        return drafter

    return make
