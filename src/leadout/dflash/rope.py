"""Rotary position embedding: the rotation of each pair of head dimensions at a position.

Everything is computed from the configuration when needed and not stored on a module: a buffer
would lose precision when the drafter is cast to bfloat16, and would stay uninitialized when the
drafter is built on the meta device and its weights are assigned.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from leadout.dflash.config import LinearScaling, Llama3Scaling, Rope, Yarn


class Rotation(NamedTuple):
    """Cosine and sine of every angle, one per position and pair of dimensions."""

    cos: Tensor  # [batch, 1, length, rotary_dim / 2], float32
    sin: Tensor  # [batch, 1, length, rotary_dim / 2], float32


def rotation_at(rope: Rope, head_dim: int, positions: Tensor) -> Rotation:
    """The rotation for tokens at these absolute positions, [batch, length]."""
    frequencies = inverse_frequencies(rope, head_dim, positions.device)
    angles = positions[:, None, :, None].float() * frequencies  # [batch, 1, length, rotary_dim / 2]
    factor = attention_factor(rope)
    return Rotation(angles.cos() * factor, angles.sin() * factor)


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys, [batch, heads, length, head_dim], in the half-split layout.

    Dimension i pairs with dimension i + rotary_dim / 2; dimensions past rotary_dim are not rotated.
    """
    half = rotation.cos.shape[-1]
    cos, sin = rotation.cos.to(heads.dtype), rotation.sin.to(heads.dtype)
    first, second, unrotated = heads.tensor_split([half, 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, unrotated], dim=-1)


def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device | None = None) -> Tensor:
    """Angle per position of each rotated pair: [rotary_dim / 2], float32."""
    rotary_dim = int(head_dim * rope.fraction)
    exponents = torch.arange(0, rotary_dim, 2, device=device).float() / rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling() as llama3:
            return _llama3(frequencies, llama3)
        case Yarn() as yarn:
            return _yarn(frequencies, yarn, rope.theta, rotary_dim)


def attention_factor(rope: Rope) -> float:
    """The factor of cosine and sine with which YaRN compensates for the longer context."""
    if not isinstance(rope.scaling, Yarn):
        return 1.0
    yarn = rope.scaling
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _yarn_temperature(yarn.factor, yarn.mscale) / _yarn_temperature(
            yarn.factor, yarn.mscale_all_dim
        )
    return _yarn_temperature(yarn.factor, 1.0)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Scale down low frequencies, keep high ones, and interpolate in between."""
    turns = frequencies * scaling.original_max_positions / (2 * math.pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / width).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, scaling: Yarn, theta: float, rotary_dim: int) -> Tensor:
    """Keep the frequencies of pairs that rotate often in the original context, scale the others."""

    def pair_that_turns(times: float) -> float:
        wavelength = scaling.original_max_positions / (times * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The upper bound counts dimensions although `last` counts pairs: all published YaRN
    # checkpoints were trained like this.
    first, last = max(first, 0), min(last, rotary_dim - 1)
    span = last - first if last != first else 0.001
    pairs = torch.arange(rotary_dim // 2, device=frequencies.device).float()
    slowed = ((pairs - first) / span).clamp(0.0, 1.0)
    return slowed * frequencies / scaling.factor + (1.0 - slowed) * frequencies


def _yarn_temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
