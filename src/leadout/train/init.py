"""New drafters: shape, mask token and initial weights, or a trained one with fewer draft tokens.

A reduced draft vocabulary has the target's most frequent tokens. With a large vocabulary and a
small drafter, the output head is the largest cost of drafting. Rare tokens are then never drafted;
the target still generates them, as its output never depends on drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leadout.checkpoints import Checkpoint, load_weights, read_checkpoint, write_checkpoint
from leadout.checkpoints.tensors import DRAFT_TO_TARGET
from leadout.dflash.config import DrafterConfig, LayerAttention
from leadout.dflash.drafter import Drafter
from leadout.dflash.target import UnsupportedTargetError
from leadout.evaluate.target_weights import HEAD, TargetFiles, load_target_weights
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


def default_layers(model_config: Any) -> int:
    """Draft layers for a target: fewer for a small one, whose own step takes little time."""
    return 2 if count_parameters(model_config) < SMALL_TARGET_PARAMETERS else 5


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


def trained_drafter(config: DrafterConfig, folder: Path) -> Drafter:
    """The weights of a trained drafter; only its block size may differ."""
    checkpoint = read_checkpoint(folder)
    for field in dataclasses.fields(config):
        trained = getattr(checkpoint.config, field.name)
        expected = getattr(config, field.name)
        if field.name != "block_size" and trained != expected:
            raise TrainError(
                f"--initial {folder}: this drafter has {field.name} {trained}, but the settings "
                f"ask for {expected}. Use the settings of that drafter (only the block size may "
                "differ), or start with --initial random."
            )
    drafter, weights = new_drafter(config, seed=0), load_weights(checkpoint)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(weights[name])
    return drafter


def reduce_draft_vocab(
    source: Path, destination: Path, target: Path, answers: Iterable[Sequence[int]], size: int
) -> tuple[Checkpoint, float]:
    """Write `source` with a head of `size` rows.

    Returns the new checkpoint and the share of the answers' tokens that it can draft. `answers`
    are token ids generated by the target.
    """
    checkpoint = read_checkpoint(source)
    config = checkpoint.config
    if config.own_head:
        raise TrainError(
            f"{source} already has its own output head ({config.head_rows} rows). Use the drafter "
            "that it was made from, which uses the target's head."
        )
    counts = token_counts(answers, config.vocab_size)
    seen = int((counts > 0).sum())
    if not 0 < size < config.vocab_size or size > seen:
        raise TrainError(
            f"--draft-vocab {size} must be between 1 and {min(seen, config.vocab_size - 1)}: the "
            f"answers contain {seen} of {config.vocab_size} tokens. Use more answers, or a smaller "
            "vocabulary."
        )
    rows = counts.topk(size).indices.sort().values  # [size], target ids
    weights = load_weights(checkpoint)
    dtype = weights["fc.weight"].dtype
    head = load_target_weights(TargetFiles(target), dtype, torch.device("cpu")).head
    weights[HEAD] = head[rows].contiguous()
    weights[DRAFT_TO_TARGET] = rows - torch.arange(size)
    write_checkpoint(
        destination,
        weights,
        dataclasses.replace(config, own_head=True, draft_vocab_size=size),
        "speculators",  # the only published format with a draft vocabulary
        target_name=str(target),
        draft_tokens=checkpoint.draft_tokens,
    )
    return read_checkpoint(destination), float(counts[rows].sum() / counts.sum())


def token_counts(answers: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """How often each token occurs, [vocab]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for answer in answers:
        counts += torch.bincount(torch.tensor(answer), minlength=vocab_size)
    return counts
