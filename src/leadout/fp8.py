"""Hidden states in FP8 (e4m3), with one float32 scale for each token and layer."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


def to_fp8(states: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 values of states [tokens, layers, H], and the scale of each token and layer."""
    largest = states.abs().amax(-1).float()  # [tokens, layers]
    scales = (largest / torch.finfo(FP8).max).clamp(min=torch.finfo(torch.float32).tiny)
    return (states.float() / scales[..., None]).to(FP8), scales


def from_fp8(values: Tensor, scales: Tensor) -> Tensor:
    """The states in float32."""
    return values.float() * scales[..., None]
