"""What both checkpoint formats share: the Qwen3 decoder's fields, above all the rotary embedding.

Old files have a flat `rope_theta` and perhaps a `rope_scaling`; files of transformers 5 have one
`rope_parameters`. In transformers a value inside these dictionaries overrides a flat one, in other
readers it is the other way round. A file that has both must therefore state the same value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from leadout.checkpoints.config_fields import (
    Epsilon,
    Heads,
    JsonObject,
    Layers,
    LayerTypes,
    Multiplier,
    Positions,
    Rows,
    StrictFields,
    Width,
    agreed,
    validated,
)
from leadout.checkpoints.errors import CheckpointError, missing
from leadout.checkpoints.unsupported import unsupported
from leadout.dflash.config import (
    DrafterConfig,
    LayerAttention,
    LinearScaling,
    Llama3Scaling,
    Rope,
    Yarn,
)

DEFAULT_THETA = 10_000.0  # the default in transformers
FULL = "full_attention"
SLIDING = "sliding_attention"

Theta = Annotated[float, Field(gt=1.0, le=1e12)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Stretch = Annotated[float, Field(ge=1.0, le=1e6)]
Value = TypeVar("Value")


class RopeSection(StrictFields, extra="forbid"):
    """`rope_parameters` or `rope_scaling`, for all layers."""

    rope_type: str | None = None
    type: str | None = None  # the older name of rope_type
    rope_theta: Theta | None = None
    partial_rotary_factor: Share | None = None
    factor: Stretch | None = None
    original_max_position_embeddings: Positions | None = None
    attention_factor: Multiplier | None = None
    beta_fast: Multiplier | None = None
    beta_slow: Multiplier | None = None
    mscale: Annotated[float, Field(ge=0.0, le=1e3)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0.0, le=1e3)] | None = None
    truncate: bool | None = None
    low_freq_factor: Multiplier | None = None
    high_freq_factor: Multiplier | None = None


_TYPE_NAMES = {LinearScaling: "linear", Llama3Scaling: "llama3", Yarn: "yarn"}
_OTHER_ROPE = "another kind of rotary embedding"
_ALWAYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_FIELDS_OF_TYPE = {
    "default": _ALWAYS,
    "linear": _ALWAYS | {"factor"},
    "llama3": _ALWAYS
    | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": _ALWAYS
    | {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
    | {"mscale", "mscale_all_dim", "truncate"},
}


class RopeFields(StrictFields):
    """The rope fields of a decoder section."""

    rope_theta: float | None = None
    rope_parameters: JsonObject | None = None
    rope_scaling: JsonObject | None = None
    partial_rotary_factor: float | None = None

    @property
    def states_no_rope(self) -> bool:
        return self.rope_theta is None and not self.rope_parameters and not self.rope_scaling


class DecoderFields(RopeFields):
    """The fields of Qwen3Config that both formats have."""

    model_type: str = "qwen3"
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    rms_norm_eps: Epsilon
    attention_bias: bool = False
    max_position_embeddings: Positions
    vocab_size: Rows
    layer_types: LayerTypes | None = None
    sliding_window: Positions | None = None
    use_sliding_window: bool | None = None
    max_window_layers: int = 28


def read_rope(
    fields: RopeFields, layer_types: frozenset[str], max_positions: int, path: Path, at: str
) -> Rope:
    """The rotary embedding in these fields; contradictions and unknown types are errors."""
    flat = {"rope_theta": fields.rope_theta, "partial_rotary_factor": fields.partial_rotary_factor}
    named = {"rope_parameters": fields.rope_parameters, "rope_scaling": fields.rope_scaling}
    ropes: dict[str, Rope] = {}
    for name, section in named.items():
        if section:
            where = f"{at}.{name}" if at else name
            for_all = _for_all_layers(section, layer_types, path, where)
            ropes[where] = _read_section(for_all, flat, max_positions, path, where)
    if not ropes:
        return _read_section({}, flat, max_positions, path, at)
    (first, rope), *others = ropes.items()
    for name, other in others:
        if other != rope:
            raise CheckpointError(
                path, name, other, f"the same as in {first}, {rope}", "Remove one of the two."
            )
    return rope


def write_rope(rope: Rope) -> JsonObject:
    """Both spellings, so that every reader finds one that it supports."""
    parameters: JsonObject = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling is not None:
        parameters["rope_type"] = _TYPE_NAMES[type(rope.scaling)]
        for name, value in asdict(rope.scaling).items():
            if value is not None:
                original = name == "original_max_positions"
                parameters["original_max_position_embeddings" if original else name] = value
    if rope.fraction != 1.0:
        parameters["partial_rotary_factor"] = rope.fraction
    return {"rope_theta": rope.theta, "rope_parameters": parameters}


def describe_rope(rope: Rope) -> str:
    """The rotary embedding in one line."""
    parts = [f"theta {rope.theta:.15g}"]
    if rope.scaling is not None:
        parts.append(f"{_TYPE_NAMES[type(rope.scaling)]} x{rope.scaling.factor:g}")
        if not isinstance(rope.scaling, LinearScaling):
            parts[-1] += f" from {rope.scaling.original_max_positions}"
    if rope.fraction != 1.0:
        parts.append(f"{rope.fraction:.0%} of each head")
    return ", ".join(parts)


def _for_all_layers(
    section: Mapping[str, object], layer_types: frozenset[str], path: Path, at: str
) -> Mapping[str, object]:
    """The parameters for all layers; one dictionary per layer type is fine if they are equal."""
    per_type = {kind: section[kind] for kind in layer_types if isinstance(section.get(kind), dict)}
    if not per_type:
        return section
    first, *others = per_type.values()
    if len(per_type) < len(layer_types) or any(other != first for other in others):
        raise unsupported(path, at, section, "a drafter whose layers rotate differently")
    return first if isinstance(first, dict) else {}


def _read_section(
    section: Mapping[str, object],
    flat: Mapping[str, object],
    max_positions: int,
    path: Path,
    at: str,
) -> Rope:
    for name in ("mrope_section", "xdrope_section", "rope_dim", "use_fope", "short_factor"):
        if section.get(name):
            raise unsupported(path, f"{at}.{name}", section[name], _OTHER_ROPE)
    ignored = ("finetuned", "mrope_interleaved")
    stated = {k: value for k, value in section.items() if value is not None and k not in ignored}
    read = validated(RopeSection, stated, path, at)
    kind = agreed(path, f"{at}.rope_type", read.rope_type, read.type) or "default"
    if kind not in _FIELDS_OF_TYPE:
        raise unsupported(path, f"{at}.rope_type", kind, _OTHER_ROPE)
    for name in read.model_fields_set - _FIELDS_OF_TYPE[kind]:
        raise CheckpointError(
            path, f"{at}.{name}", getattr(read, name), f"no such field with rope_type {kind}",
            "Correct rope_type or remove the field.",
        )  # fmt: skip
    outside = validated(RopeSection, flat, path, "")
    theta, fraction = (
        agreed(path, f"{at}.{name}", getattr(read, name), getattr(outside, name))
        for name in ("rope_theta", "partial_rotary_factor")
    )
    return Rope(
        theta=DEFAULT_THETA if theta is None else theta,
        scaling=_scaling(read, kind, max_positions, path, at),
        fraction=1.0 if fraction is None else fraction,
    )


def _scaling(
    read: RopeSection, kind: str, max_positions: int, path: Path, at: str
) -> Yarn | Llama3Scaling | LinearScaling | None:
    if kind == "default":
        return None
    factor = _required(read.factor, path, f"{at}.factor")
    if kind == "linear":
        return LinearScaling(factor)
    # transformers and vLLM both default to the maximum position here.
    original = read.original_max_position_embeddings or max_positions
    if kind == "llama3":
        low = _required(read.low_freq_factor, path, f"{at}.low_freq_factor")
        high = _required(read.high_freq_factor, path, f"{at}.high_freq_factor")
        if not low < high:
            raise CheckpointError(
                path, f"{at}.high_freq_factor", high, f"a number above low_freq_factor ({low})",
                "Correct the field.",
            )  # fmt: skip
        return Llama3Scaling(factor, low, high, original)
    stated = {
        name: value
        for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        if (value := getattr(read, name)) is not None
    }
    return Yarn(factor, original, **stated, truncate=read.truncate is not False)


def _required(value: Value | None, path: Path, field: str) -> Value:
    if value is None:
        raise missing(path, field, "a number")
    return value


# Fields of `DrafterConfig` whose names in both formats differ.
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
    """What a format's reader returns."""

    config: DrafterConfig
    target_name: str | None = None  # the target named in the file
    draft_tokens: int | None = None  # the K stated in the file
    notes: tuple[str, ...] = ()
    # Unknown fields that do not affect the computation.
    kept: JsonObject = field(default_factory=dict)


def window_off(path: Path, field: str, window: int) -> CheckpointError:
    """The error for sliding layers whose window is switched off."""
    return CheckpointError(
        path,
        field,
        False,
        f"true, since layers have a sliding window of {window}",
        "Correct it, or make the layers full_attention.",
    )


def require_layer_types(
    layer_types: Sequence[str], num_layers: int, path: Path, at: str
) -> tuple[str, ...]:
    """The attention type of each layer, validated."""
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
    """All decoder fields, under the names of Qwen3Config."""
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
    """Window fields of transformers, which allow one size for all sliding layers."""
    windows = {layer.window for layer in layers} - {None}
    if len(windows) > 1:
        raise CheckpointError(
            path,
            "sliding_window",
            sorted(window for window in windows if window),
            "one window size for all sliding layers",
            "No published format supports this drafter.",
        )
    return {
        "layer_types": [FULL if layer.window is None else SLIDING for layer in layers],
        "sliding_window": next(iter(windows), None),
        # Without it, transformers ignores the window.
        "use_sliding_window": bool(windows),
    }
