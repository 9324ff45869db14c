"""Which models can be targets of a drafter, from config.json alone.

Every command that spends time on a target asks first: `data` would otherwise generate text for
hours that `train` then refuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from leadout.dflash.config import Rope
from leadout.dflash.target import UnsupportedTargetError
from leadout.pairing.target import decoder_section, read_any_config, read_target, target_from_config

_Config = Mapping[str, object]

_MODALITIES = ("vision", "audio", "speech", "video", "image")
_NOT_TEXT = ("vision_tower", "mm_vision_tower", "img_processor", "audio_processor")
# Models whose layers are all recurrent; hybrids with attention layers are left to the engine.
_RECURRENT = ("mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5", "rwkv6", "rwkv7", "retnet")
_OTHER_HEADS = (
    "Classification",
    "QuestionAnswering",
    "Reward",
    "Embedding",
    "MaskedLM",
    "Retrieval",
)


class Refusal(NamedTuple):
    """Why no drafter can be trained for a model, and what to do instead."""

    name: str
    reason: str
    remedy: str
    applies: Callable[[_Config], bool]
    new_only: bool = False  # an existing drafter can be served, checked and trained further


def require_trainable(folder: Path, name: str | None = None, *, new: bool = True) -> None:
    """Raise the error with reason and remedy where no drafter can be trained for this model.

    With `new` the drafter does not exist yet, so its shape must follow from the config.
    """
    refused = refusal(read_any_config(folder), new=new)
    if refused is not None:
        raise UnsupportedTargetError(
            f"{name or folder} cannot be the target of a {'new ' if new else ''}drafter: "
            f"{refused.reason}. {refused.remedy}"
        )
    read_target(folder, name)  # refuses a drafter in the target's place


def refusal(config: _Config, *, new: bool = True) -> Refusal | None:
    """The first reason against a model with this config; None: a drafter can be trained for it."""
    return next((r for r in REFUSALS if (new or not r.new_only) and r.applies(config)), None)


def drafter_rope(config: _Config, name: str) -> Rope | None:
    """The rotary embedding for a new drafter; None: the config has none that a drafter can have.

    A drafter rotates its own queries and keys, so it need not repeat everything that the target
    does: where the target's layers rotate differently, it has that of full attention, and where
    the target rotates a part of each head, it rotates whole heads, as engines disagree on parts.
    """
    section, _ = decoder_section(config)
    simple = {key: value for key, value in section.items() if key != "rope_local_base_freq"}
    parameters = simple.get("rope_parameters")
    if isinstance(parameters, dict) and isinstance(parameters.get("full_attention"), dict):
        simple["rope_parameters"] = parameters["full_attention"]
        simple.pop("rope_theta", None)
    rope = target_from_config(simple, name).rope
    return None if rope is None else dataclasses.replace(rope, fraction=1.0)


def _has_encoder(config: _Config) -> bool:
    return config.get("is_encoder_decoder") is True or "encoder_layers" in config


def _is_multimodal(config: _Config) -> bool:
    named = any(f"{kind}_config" in config for kind in _MODALITIES)
    return named or "thinker_config" in config or any(key in config for key in _NOT_TEXT)


def _has_other_head(config: _Config) -> bool:
    names = config.get("architectures")
    listed = [str(each) for each in names] if isinstance(names, list) else []
    return bool(listed) and all(any(head in each for head in _OTHER_HEADS) for each in listed)


def _is_recurrent(config: _Config) -> bool:
    section, _ = decoder_section(config)
    kinds = section.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return not any("attention" in str(kind) and "linear" not in str(kind) for kind in kinds)
    return str(section.get("model_type")) in _RECURRENT


def _has_several_positions(config: _Config) -> bool:
    section, _ = decoder_section(config)
    ropes = [section.get(name) for name in ("rope_parameters", "rope_scaling")]
    return any(isinstance(each, dict) and each.get("mrope_section") for each in ropes)


def _has_no_rope(config: _Config) -> bool:
    return drafter_rope(config, "target") is None


_PUBLISHED = "`leadout serve --draft auto` finds a published drafter, if there is one."
REFUSALS = (
    Refusal(
        "encoder-decoder",
        "it has an encoder, and a drafter reads the hidden states of a decoder alone",
        "Use a decoder-only model.",
        _has_encoder,
    ),
    Refusal(
        "multimodal",
        "it reads images, audio or video besides text, and Leadout trains on text alone",
        f"Use a text-only checkpoint of the model. {_PUBLISHED}",
        _is_multimodal,
        new_only=True,
    ),
    Refusal(
        "no-generation",
        "its config names an architecture that classifies or embeds text and generates none",
        "Use the checkpoint with a language-model head (...ForCausalLM).",
        _has_other_head,
    ),
    Refusal(
        "no-attention",
        "it has no attention layers, and vLLM cannot take back rejected drafts from a recurrent "
        "state alone",
        "Use a model with attention layers.",
        _is_recurrent,
    ),
    Refusal(
        "mrope",
        "its rotary embedding has several positions per token (M-RoPE), which a drafter of "
        "Leadout's does not have",
        f"Use a text-only checkpoint of the model. {_PUBLISHED}",
        _has_several_positions,
        new_only=True,
    ),
    Refusal(
        "no-rope",
        "its config has no rotary position embedding that a drafter could have (rope_theta, or a "
        "known type in rope_parameters or rope_scaling)",
        "Use a model with rotary embeddings; if only the field is missing, add rope_theta to its "
        "config.json.",
        _has_no_rope,
        new_only=True,
    ),
)
