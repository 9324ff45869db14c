"""What is known about a target: the facts that the pairing rules need, and a published drafter.

Any model may be a target. Unlike the reader of drafters, this one reads a few fields of config.json
and leaves the rest to the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from leadout.checkpoints import CheckpointError, speculators, zlab
from leadout.checkpoints.decoder_config import RopeFields, read_rope
from leadout.checkpoints.errors import MISSING, Phrase, missing
from leadout.dflash.config import InvalidDrafterError, LogitScaling, Rope
from leadout.files import FileError, read_object
from leadout.models import hub_name, same_model

CONFIG = "config.json"
# Where multimodal models keep their text decoder.
_DECODER_SECTIONS = ("thinker_config", "text_config", "llm_config", "language_config")


# How transformers' and vLLM's model classes scale the scores of the output head.
_LOGIT_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_LOGIT_DIVISORS = ("logits_scaling",)
_LOGIT_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# These multiply by the field that all other families divide by.
_MULTIPLY_BY_SCALING = frozenset({"hyperclovax"})
# The defaults of model classes, for configs that omit the field.
_DEFAULT_MULTIPLIER = {"cohere": 0.0625, "cohere2": 0.0625, "cohere2_moe": 0.0625}
_DEFAULT_SOFTCAP = {"gemma2": 30.0, "gemma3n_text": 30.0, "vaultgemma": 30.0, "nanochat": 15.0}


class PublishedDrafter(NamedTuple):
    """A drafter on the hub and the target it was trained for."""

    target: str
    drafter: str


AS_OF = "2026-11"
# Targets and their drafters on the Hugging Face hub, for `--draft auto`: plain DFlash drafters in
# the two formats that Leadout reads, where the target is certain. Successors such as DFlash 2, and
# drafters with attention sinks, gates or quantized weights, are not included. If a target has
# several, the first is used.
PUBLISHED = tuple(
    PublishedDrafter(*row)
    for row in (
        ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
        ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
        ("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.dflash"),
        ("Qwen/Qwen3-30B-A3B", "RedHatAI/Qwen3-30B-A3B-speculator.dflash"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
        ("Qwen/Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash"),
        ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash"),
        ("Qwen/Qwen3.5-122B-A10B", "z-lab/Qwen3.5-122B-A10B-DFlash"),
        ("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash"),
        ("Qwen/Qwen3.6-35B-A3B", "z-lab/Qwen3.6-35B-A3B-DFlash"),
        ("meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
        ("openai/gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash"),
        ("moonshotai/Kimi-K2.5", "z-lab/Kimi-K2.5-DFlash"),
        ("google/gemma-4-31B-it", "z-lab/gemma-4-31B-it-DFlash"),
    )
)


DEFAULT_TAPS = 5
MIN_SPREAD_LAYERS = 5


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The properties of a target that matter to a drafter."""

    name: str  # a hub name or a folder, as the user gave it
    hidden_size: int
    num_layers: int
    vocab_size: int  # rows of its embedding, padding included
    rope: Rope | None  # None: not stated, or of a type that a drafter cannot have
    max_positions: int | None


def read_target(folder: Path, name: str | None = None) -> TargetFacts:
    """The facts from a model folder; `name` is its name in messages, by default the folder."""
    config = read_any_config(folder)
    if speculators.matches(config) or zlab.matches(config):
        raise CheckpointError(
            folder,
            "folder",
            Phrase("is a DFlash drafter"),
            "the target model",
            "Are target and drafter swapped?",
        )
    return target_from_config(config, name or str(folder), folder / CONFIG)


def read_any_config(folder: Path) -> dict[str, object]:
    """The config.json of any model."""
    path = folder / CONFIG
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(
            folder, "folder", Phrase(problem), "the folder of a model", "Check the path."
        )
    if not path.exists():
        raise missing(
            folder,
            CONFIG,
            "the folder of a Hugging Face model",
            "Check the path: it must be the folder that has the config.json.",
        )
    # Not the strict reader: configs of state-space models may contain Infinity.
    try:
        return read_object(path)
    except FileError as problem:
        raise CheckpointError(
            path,
            "file",
            Phrase(f"cannot be read ({str(problem).removesuffix('.')})"),
            "the JSON object of a Hugging Face model",
            "Check the path of the target, or download it again.",
        ) from None


def target_from_config(
    config: Mapping[str, object], name: str, path: Path | None = None
) -> TargetFacts:
    """The facts from a config's fields, such as `to_dict()` of a transformers config.

    `path` is the file to name in errors.
    """
    section, at = decoder_section(config)
    source = path or Path(name)
    positions = section.get("max_position_embeddings")
    max_positions = positions if type(positions) is int and positions > 0 else None
    return TargetFacts(
        name=name,
        hidden_size=_count(section, "hidden_size", source, at),
        num_layers=_count(section, "num_hidden_layers", source, at),
        vocab_size=_count(section, "vocab_size", source, at),
        rope=_rope(section, max_positions, source, at),
        max_positions=max_positions,
    )


def spread_layer_ids(target_layers: int, taps: int = DEFAULT_TAPS) -> tuple[int, ...]:
    """Evenly spaced layers from the second to the third from last; fewer in a shallow target."""
    if target_layers < MIN_SPREAD_LAYERS:
        return tuple(range(target_layers))[-taps:]
    if taps == 1:
        return (target_layers // 2,)
    return tuple(sorted({round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps)}))


def read_logit_scaling(config: Mapping[str, object], path: Path) -> LogitScaling:
    """How a target turns the scores of its head into logits, from its config.json at `path`."""
    section, at = decoder_section(config)
    family = str(section.get("model_type"))

    def stated(names: tuple[str, ...]) -> float | None:
        for name in names:
            value = section.get(name)
            if value is None:
                continue
            number = _number(value)
            if number is None or not 0 < number < math.inf:
                raise CheckpointError(
                    path,
                    f"{at}.{name}" if at else name,
                    value,
                    "a positive number",
                    "Check the config of the target: without it its logits are unknown.",
                )
            return number
        return None

    multiplier = stated(_LOGIT_MULTIPLIERS)
    if multiplier is None and not any(name in section for name in _LOGIT_MULTIPLIERS):
        multiplier = _DEFAULT_MULTIPLIER.get(family)
    divisor = stated(_LOGIT_DIVISORS) or 1.0
    base = stated(("dim_model_base",))  # of MiniCPM, which divides the states before the head
    if base is not None:
        divisor *= _count(section, "hidden_size", path, at) / base
    softcap = stated(_LOGIT_SOFTCAPS)
    if softcap is None and not any(name in section for name in _LOGIT_SOFTCAPS):
        softcap = _DEFAULT_SOFTCAP.get(family)
    factor = divisor if family in _MULTIPLY_BY_SCALING else 1 / divisor
    return LogitScaling((multiplier or 1.0) * factor, softcap)


def find_published(target: str) -> PublishedDrafter | None:
    """The drafter for a hub name, or for a local folder with the name of the model.

    The whole name must match, ignoring case: base models, quantizations and copies of other owners
    are different models.
    """
    named = hub_name(target)
    for row in PUBLISHED:
        same_owner = named is None or named.casefold() == row.target.casefold()
        if same_owner and same_model(target, row.target):
            return row
    return None


def decoder_section(config: Mapping[str, object]) -> tuple[Mapping[str, object], str]:
    """The text decoder's fields, and their path inside the file."""
    path: list[str] = []
    section = config
    for name in _DECODER_SECTIONS:
        nested = section.get(name)
        if isinstance(nested, dict):
            section = nested
            path.append(name)
    return section, ".".join(path)


def _count(section: Mapping[str, object], field: str, path: Path, at: str) -> int:
    value = section.get(field)
    if type(value) is not int or value < 1:  # True is an int, but not a count
        raise CheckpointError(
            path,
            f"{at}.{field}" if at else field,
            MISSING if value is None else value,
            "a positive number",
            "Check that this is the target's folder; add the field if its config omits it.",
        )
    return value


def _rope(
    section: Mapping[str, object], max_positions: int | None, path: Path, at: str
) -> Rope | None:
    """The target's rotary embedding, or None if a drafter cannot have the same."""
    parameters = _mapping(section.get("rope_parameters"))
    scaling = _mapping(section.get("rope_scaling"))
    fields = RopeFields(
        rope_theta=_number(section.get("rope_theta")),
        rope_parameters=parameters,
        rope_scaling=scaling,
        partial_rotary_factor=_number(section.get("partial_rotary_factor")),
    )
    stated = [
        fields.rope_theta,
        *(each.get("rope_theta") for each in (parameters, scaling) if each),
    ]
    kinds = section.get("layer_types")
    layer_types = {str(kind) for kind in kinds} if isinstance(kinds, list | tuple) else set()
    per_kind = parameters is not None and any(kind in parameters for kind in layer_types)
    if not per_kind and not any(stated):
        return None  # its model class has a default that is not in the file
    if section.get("rope_local_base_freq") is not None:
        return None  # sliding layers use another theta
    try:
        return read_rope(fields, frozenset(layer_types), max_positions or 0, path, at)
    except (CheckpointError, InvalidDrafterError):
        return None


def _mapping(value: object) -> dict[str, object] | None:
    return value if isinstance(value, dict) and value else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
