"""A new drafter for a target: its shape, its wiring and its first weights."""

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
from leadout.errors import LeadoutError
from leadout.pairing import read_target

# A new drafter's guesses are random directions: at full length its first loss would be several
# times that of a uniform guess.
FIRST_NORM = 0.25
DEFAULT_TAPS = 5
MIN_SPREAD_LAYERS = 5
MOE_WIDTH = 3  # a mixture's experts are too narrow for a dense MLP: so many times the hidden size


class UnfitStartError(LeadoutError):
    """The drafter to go on from has another shape than the one to train."""


class NoMaskTokenError(LeadoutError):
    """No token of the target can stand for a slot that is still empty."""


def spread_layer_ids(target_layers: int, taps: int = DEFAULT_TAPS) -> tuple[int, ...]:
    """Taps from the second layer to the third from last, evenly spread; fewer if it is shallow."""
    if target_layers < MIN_SPREAD_LAYERS:
        return tuple(range(target_layers))[-taps:]
    if taps == 1:
        return (target_layers // 2,)
    return tuple(sorted({round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps)}))


def choose_mask_token(
    vocab_size: int,
    tokenizer_size: int,
    specials: Iterable[int],
    ends: Iterable[int],
    used: set[int],
) -> int:
    """A row of the target's embedding that means nothing in the data.

    Best is one beyond the tokenizer; else a special token that neither ends a text nor occurs.
    """
    if tokenizer_size < vocab_size:
        return tokenizer_size
    free = sorted(set(specials) - set(ends) - used)
    if free:
        return free[0]
    raise NoMaskTokenError(
        f"--mask-token-id: found none by itself: all {vocab_size} rows of the embedding belong to "
        "the tokenizer and every special token is in use; wanted a token id that your traffic "
        "never contains: give one"
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
            f"{target}: found no rotary embedding that a drafter could share, wanted one; this "
            "architecture cannot be a target yet"
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
        nn.init.constant_(drafter.norm.weight, FIRST_NORM)
    return drafter


def first_drafter(config: DrafterConfig, initial: str, seed: int) -> Drafter:
    """A drafter with the first weights that `initial` asks for."""
    drafter = new_drafter(config, seed)
    if initial != "random":
        go_on_from(drafter, Path(initial))
    return drafter


def go_on_from(drafter: Drafter, folder: Path) -> None:
    """Take over a trained drafter's weights; only its block size may be another."""
    checkpoint = read_checkpoint(folder)
    wanted = drafter.config
    for field in dataclasses.fields(wanted):
        found = getattr(checkpoint.config, field.name)
        if field.name != "block_size" and found != getattr(wanted, field.name):
            raise UnfitStartError(
                f"--initial {folder}: found {field.name} {found}, wanted "
                f"{getattr(wanted, field.name)}; train with the settings of that drafter (its "
                "block size may change), or start anew with `random`"
            )
    weights = load_weights(checkpoint)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(weights[name])
