"""Recognises checkpoints of DFlash's successors and relatives, which Leadout does not implement.

Some of them vLLM's DFlash class computes itself, such as quantized weights and attention sinks:
those can be served, but not trained or compared with the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from leadout.checkpoints.config_fields import JsonObject
from leadout.checkpoints.errors import UnsupportedCheckpointError

_DFLASH2 = "DFlash 2, which adds convolutions and a candidate selector"
_DSPARK = "DSpark, which samples from the anchor and adds a Markov head"
_LAGUNA = "a Laguna drafter, which gates its heads and normalizes every tapped layer separately"
_MUSE = "a Muse Glimmer assistant, which has its own tensor names and embedding rule"
_EAGLE = "EAGLE, which drafts one token after another"
_SINKS = "attention sinks"
_QUANTIZED = "a quantized drafter"
_VALUE_SCALE = "scaled attention values"
_LOGIT_SCALE = "scaled logits, which vLLM applies and z-lab's code does not"
_FUSED_ATTENTION = "fused query, key and value projections"
_FUSED_MLP = "fused gate and up projections"
TRAINED_MASK = "a trained mask embedding"

# What vLLM 0.32 computes for a drafter that has it.
_SERVED_BY_VLLM = frozenset(
    {_QUANTIZED, _SINKS, _VALUE_SCALE, _LOGIT_SCALE, _FUSED_ATTENTION, _FUSED_MLP}
)

# By a part of the architecture's name; the first match counts.
_ARCHITECTURES = {
    "DFlash2": _DFLASH2,
    "DSpark": _DSPARK,
    "Laguna": _LAGUNA,
    "MuseGlimmer": _MUSE,
    "Eagle": _EAGLE,
    "EAGLE": _EAGLE,
    "LiLiCorr": "LiLiCorr, which rescores candidates with a second transformer",
    "Medusa": "Medusa, which has one head per drafted token",
}

_SPECULATORS_TYPES = {
    "dflash2": _DFLASH2,
    "dspark": _DSPARK,
    "eagle": _EAGLE,
    "eagle3": _EAGLE,
    "peagle": "P-EAGLE",
    "mtp": "multi-token prediction",
    "xpress": "XPress, which refines its drafts in further passes",
}


# Fields of other drafters, each with the values that disable it; null always does. Every section of
# a config is searched, since readers expect them in different places.
_FEATURES: dict[str, tuple[object, ...]] = {
    "conv_kernel_size": (_DFLASH2,),
    "conv_group_size": (_DFLASH2,),
    "selector_rank": (_DFLASH2,),
    "selector_top_k": (_DFLASH2,),
    "markov_rank": (_DSPARK,),
    "markov_head_type": (_DSPARK,),
    "enable_confidence_head": (_DSPARK, False),
    "sample_from_anchor": ("blocks whose anchor slot also predicts (DSpark)", False),
    "projector_type": ("a projector other than DFlash's", "dflash"),
    "attention_mode": ("latent attention", "gqa", "mha"),
    "attention_sink_bias": (_SINKS, False),
    "add_swa_attention_sink_bias": (_SINKS, False),
    "add_full_attention_sink_bias": (_SINKS, False),
    "attention_value_scale": (_VALUE_SCALE, 1, 1.0),
    "hc_mult": ("a target with several residual streams (hyper-connections)", 1),
    "gating": ("gated attention heads", False),
    "is_neox_style": ("interleaved rotary embedding", True),
    "rope_is_neox_style": ("interleaved rotary embedding", True),
    "use_aux_hidden_state": ("a drafter without tapped target layers", True),
    "logit_scale": (_LOGIT_SCALE, 1, 1.0),
    "hidden_act": ("an activation other than SiLU", "silu"),
    "eagle_config": (_EAGLE, {}),
    "per_layer_config": ("layers of different sizes", {}),
    "quantization_config": (_QUANTIZED, {}),
    "compression_config": (_QUANTIZED, {}),
}

# By parts of a tensor's name; the first match counts.
_TENSORS = {
    _DFLASH2: ("attention_conv.", "mlp_conv.", "candidate_selector."),
    _DSPARK: ("markov", "confidence_head"),
    _LAGUNA: (".g_proj.", "aux_hidden_norms."),
    _MUSE: ("encoder.",),
    _EAGLE: ("midlayer.",),
    _SINKS: ("attention_sink_bias",),
    TRAINED_MASK: ("mask_hidden", "mask_embedding"),
    _FUSED_ATTENTION: ("qkv_proj",),
    _FUSED_MLP: ("gate_up_proj",),
    _QUANTIZED: ("weight_scale", "weight_packed", ".scales", ".biases", "qweight"),
}


def refuse_unsupported(config: JsonObject, path: Path, *, as_served: bool = False) -> set[str]:
    """Refuse a config with the architecture, type or fields of another kind of drafter.

    `as_served` returns what vLLM computes although Leadout does not, instead of refusing it.
    """
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        for piece, what in _ARCHITECTURES.items():
            if isinstance(name, str) and piece in name:
                raise unsupported(path, "architectures", name, what)
    kind = config.get("speculators_model_type")
    if isinstance(kind, str) and kind in _SPECULATORS_TYPES:
        raise unsupported(path, "speculators_model_type", kind, _SPECULATORS_TYPES[kind])
    left_to_vllm: set[str] = set()
    sections: dict[str, object] = {"": config}
    sections |= {f"{s}.": config.get(s) for s in ("dflash_config", "transformer_layer_config")}
    for prefix, fields in sections.items():
        for name, value, what in _features(fields if isinstance(fields, dict) else {}):
            if not (as_served and what in _SERVED_BY_VLLM):
                raise unsupported(path, prefix + name, value, what)
            left_to_vllm.add(what)
    return left_to_vllm


def without_features(section: JsonObject) -> JsonObject:
    """The section without the fields of other kinds of drafters, all of them disabled."""
    return {name: value for name, value in section.items() if name not in _FEATURES}


def unsupported_tensor(name: str) -> str | None:
    """The unsupported feature that a tensor of this name belongs to, if any."""
    return next((what for what, parts in _TENSORS.items() if any(p in name for p in parts)), None)


def is_served_by_vllm(what: str) -> bool:
    return what in _SERVED_BY_VLLM


def unsupported(path: Path, field: str, found: object, what: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        path,
        field,
        found,
        "a plain DFlash drafter",
        f"Leadout does not support {what}; use another drafter.",
    )


def _features(section: JsonObject) -> Iterator[tuple[str, object, str]]:
    """Fields of other drafters that are not disabled: name, value, and what it is."""
    for name, (what, *harmless) in _FEATURES.items():
        value = section.get(name)
        # 1 == True, but a flag in place of a number is not harmless.
        disabled = any(value == other and type(value) is type(other) for other in harmless)
        if value is not None and not disabled:
            yield name, value, str(what)
