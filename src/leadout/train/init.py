"""A new drafter for a target: its shape, its mask token and its initial weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leadout.checkpoints.checkpoint import load_weights, read_checkpoint
from leadout.dflash.config import DrafterConfig, LayerAttention
from leadout.dflash.drafter import Drafter
from leadout.dflash.target import UnsupportedTargetError
from leadout.pairing import read_target
from leadout.train.config import TrainError

# At a norm of 1, a new drafter's random outputs would give an initial loss several times that of
# a uniform guess.
INITIAL_NORM = 0.25
DEFAULT_TAPS = 5
MIN_SPREAD_LAYERS = 5
# The experts of a mixture are too small to size a dense MLP by: its width in hidden sizes.
MOE_WIDTH = 3
SMALL_TARGET_PARAMETERS = 1e9
SMALL_TARGET_LAYERS = 2
LAYERS = 5


def default_layers(model_config: Any) -> int:
    """Draft layers for a target: fewer for a small one, whose own step takes little time."""
    small = count_parameters(model_config) < SMALL_TARGET_PARAMETERS
    return SMALL_TARGET_LAYERS if small else LAYERS


def count_parameters(model_config: Any) -> int:
    """The parameters of a model before quantization, without allocating them."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # transformers does not annotate from_config
    with torch.device("meta"):
        model: nn.Module = auto.from_config(model_config)
    return sum(parameter.numel() for parameter in model.parameters())


def spread_layer_ids(target_layers: int, taps: int = DEFAULT_TAPS) -> tuple[int, ...]:
    """Evenly spaced layers from the second to the third from last; fewer in a shallow target."""
    if target_layers < MIN_SPREAD_LAYERS:
        return tuple(range(target_layers))[-taps:]
    if taps == 1:
        return (target_layers // 2,)
    return tuple(sorted({round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps)}))


def choose_mask_token(
    vocab_size: int,
    tokenizer_size: int,
    special_tokens: Iterable[int],
    end_tokens: Iterable[int],
    used: set[int],
) -> int:
    """A row of the target's embedding that has no meaning in the data.

    Preferably one beyond the tokenizer; else a special token that neither ends a text nor occurs.
    """
    if tokenizer_size < vocab_size:
        return tokenizer_size
    free = sorted(set(special_tokens) - set(end_tokens) - used)
    if free:
        return free[0]
    raise TrainError(
        f"No mask token could be chosen automatically: all {vocab_size} rows of the embedding "
        "belong to the tokenizer, and every special token is in use. Set --mask-token-id to a "
        "token id that your traffic never contains."
    )


def new_config(
    target: Path,
    model_config: Any,
    *,
    layers: int,
    block_size: int,
    target_layer_ids: Sequence[int],
    mask_token_id: int,
) -> DrafterConfig:
    """A drafter with the target's own sizes, all layers bidirectional over the whole context."""
    facts = read_target(target)
    text = model_config.get_text_config()
    if facts.rope is None:
        raise UnsupportedTargetError(
            f"{target}: this architecture is not supported as a target: it has no rotary "
            "position embedding that a drafter could share."
        )
    heads = text.num_attention_heads
    is_mixture = any(getattr(text, name, None) for name in ("num_experts", "num_local_experts"))
    width = MOE_WIDTH * text.hidden_size if is_mixture else text.intermediate_size
    return DrafterConfig(
        hidden_size=facts.hidden_size,
        intermediate_size=width,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        layers=(LayerAttention(),) * layers,
        rope=facts.rope,
        max_positions=facts.max_positions or 4096,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        target_layer_ids=tuple(target_layer_ids),
        target_num_layers=facts.num_layers,
        vocab_size=facts.vocab_size,
        mask_token_id=mask_token_id,
        block_size=block_size,
    )


def new_drafter(config: DrafterConfig, seed: int) -> Drafter:
    """Random weights, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config)
        nn.init.normal_(drafter.fc.weight, std=drafter.fc.in_features**-0.5)
        nn.init.constant_(drafter.norm.weight, INITIAL_NORM)
    return drafter


def initial_drafter(config: DrafterConfig, initial: str, seed: int) -> Drafter:
    """A drafter with random weights, or with those of the drafter in the folder `initial`."""
    drafter = new_drafter(config, seed)
    if initial != "random":
        load_initial_weights(drafter, Path(initial))
    return drafter


def load_initial_weights(drafter: Drafter, folder: Path) -> None:
    """Copy a trained drafter's weights; only its block size may differ."""
    checkpoint = read_checkpoint(folder)
    for field in dataclasses.fields(drafter.config):
        trained = getattr(checkpoint.config, field.name)
        expected = getattr(drafter.config, field.name)
        if field.name != "block_size" and trained != expected:
            raise TrainError(
                f"--initial {folder}: this drafter has {field.name} {trained}, but the settings "
                f"ask for {expected}. Use the settings of that drafter (only the block size may "
                "differ), or start with --initial random."
            )
    weights = load_weights(checkpoint)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(weights[name])
