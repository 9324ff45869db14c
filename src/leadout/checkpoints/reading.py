"""What a format's reader hands on, and the small steps both readers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from leadout.checkpoints.errors import CheckpointError
from leadout.checkpoints.relatives import unsupported
from leadout.checkpoints.rope import write_rope
from leadout.checkpoints.strict_json import JsonObject
from leadout.dflash.config import DrafterConfig, LayerAttention

FULL = "full_attention"
SLIDING = "sliding_attention"

# Where Leadout's names differ from the names both formats use.
FILE_NAMES = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings",
    "layers": "num_hidden_layers",
    "target_num_layers": "num_target_layers",
    "own_embedding": "embed_tokens.weight",
    "own_head": "lm_head.weight",
    "embedding_scale": "input_embedding_scale",
    "logit_multiplier": "output_multiplier",
    "logit_softcap": "final_logit_softcapping",
}


@dataclass(frozen=True, slots=True)
class ConfigReading:
    """A config file, understood."""

    config: DrafterConfig
    target_name: str | None = None  # the target the file names
    draft_tokens: int | None = None  # the K the file asks for
    notes: tuple[str, ...] = ()
    kept: JsonObject = field(default_factory=dict)  # unknown fields that compute nothing


def require_layer_types(
    layer_types: Sequence[str], num_layers: int, path: Path, at: str
) -> tuple[str, ...]:
    """The stated kinds of the layers, one for each."""
    name = f"{at}.layer_types" if at else "layer_types"
    for kind in layer_types:
        if kind not in (FULL, SLIDING):
            raise unsupported(path, name, kind, "a drafter with another kind of attention")
    if len(layer_types) != num_layers:
        raise CheckpointError(
            path,
            name,
            list(layer_types),
            f"one entry for each of the {num_layers} layers (num_hidden_layers)",
            "Correct the list.",
        )
    return tuple(layer_types)


def write_decoder(config: DrafterConfig, path: Path) -> JsonObject:
    """The decoder's fields in the names of Qwen3Config, every one explicit."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size,
        **write_rope(config.rope),
        **_write_windows(config.layers, path),
    }


def _write_windows(layers: Sequence[LayerAttention], path: Path) -> JsonObject:
    """The windows in the fields of transformers, which know one size for all sliding layers."""
    windows = {layer.window for layer in layers} - {None}
    if len(windows) > 1:
        raise CheckpointError(
            path,
            "sliding_window",
            sorted(window for window in windows if window),
            "one window size for all sliding layers",
            "No published format can hold this drafter.",
        )
    return {
        "layer_types": [FULL if layer.window is None else SLIDING for layer in layers],
        "sliding_window": next(iter(windows), None),
        # Without it, transformers forgets the window.
        "use_sliding_window": bool(windows),
    }
