"""A target's config.json, as far as the rules need it.

Any model may be a target, so this reader is lenient where the drafter's is strict: it takes the
few fields it needs and leaves the rest to the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from leadout.checkpoints import CheckpointError
from leadout.checkpoints.decoder_config import RopeFields, read_rope
from leadout.checkpoints.errors import NOTHING, Words
from leadout.dflash.config import InvalidDrafterError, Rope
from leadout.pairing.facts import TargetFacts

CONFIG = "config.json"
# Where models that also see or hear keep their text decoder.
_DECODER_SECTIONS = ("thinker_config", "text_config", "llm_config", "language_config")


def read_target(folder: Path, name: str | None = None) -> TargetFacts:
    """The facts in a model folder; `name` is what the user calls it, the folder unless given."""
    return target_from_config(read_any_config(folder), name or str(folder), folder / CONFIG)


def read_any_config(folder: Path) -> dict[str, object]:
    """The config.json of any model, drafter or not."""
    path = folder / CONFIG
    # Not strict_json: configs of state-space targets rightly contain Infinity.
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise _not_a_config(path, str(problem)) from None
    if not isinstance(config, dict):
        raise _not_a_config(path, f"a {type(config).__name__}")
    return config


def target_from_config(
    config: Mapping[str, object], name: str, path: Path | None = None
) -> TargetFacts:
    """The same from a config's fields, such as `to_dict()` of a transformers config.

    `path` is where they come from, for error messages.
    """
    section, at = _decoder_section(config)
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


def _decoder_section(config: Mapping[str, object]) -> tuple[Mapping[str, object], str]:
    """The text decoder's fields, and the path to them inside the file."""
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
    if type(value) is not int or value < 1:  # True is no count either
        raise CheckpointError(
            path,
            f"{at}.{field}" if at else field,
            NOTHING if value is None else value,
            "a positive number",
            "Check that this is the target's folder; write the field if its config leaves it out.",
        )
    return value


def _rope(
    section: Mapping[str, object], max_positions: int | None, path: Path, at: str
) -> Rope | None:
    """The target's rotary embedding if a drafter could have the same, else None."""
    parameters = _mapping(section.get("rope_parameters"))
    scaling = _mapping(section.get("rope_scaling"))
    fields = RopeFields(
        theta=_number(section.get("rope_theta")),
        fraction=_number(section.get("partial_rotary_factor")),
        parameters=parameters,
        scaling=scaling,
    )
    stated = [fields.theta, *(each.get("rope_theta") for each in (parameters, scaling) if each)]
    kinds = section.get("layer_types")
    layer_types = {str(kind) for kind in kinds} if isinstance(kinds, list | tuple) else set()
    per_kind = parameters is not None and any(kind in parameters for kind in layer_types)
    if not per_kind and not any(stated):
        return None  # its class has a default that the file does not tell
    if section.get("rope_local_base_freq") is not None:
        return None  # sliding layers rotate differently
    try:
        return read_rope(fields, frozenset(layer_types), max_positions or 0, path, at)
    except (CheckpointError, InvalidDrafterError):
        return None


def _mapping(value: object) -> Mapping[str, object] | None:
    return value if isinstance(value, dict) and value else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _not_a_config(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        path,
        "file",
        Words(found),
        "the JSON object that describes a Hugging Face model",
        "Check the path of the target, or download it again.",
    )
