"""The facts that the pairing rules need, from a target's config.json.

Any model may be a target. Unlike the reader of drafters, this one reads a few fields and leaves
the rest to the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from leadout.checkpoints import CheckpointError, speculators, zlab
from leadout.checkpoints.decoder_config import RopeFields, read_rope
from leadout.checkpoints.errors import MISSING, Phrase
from leadout.dflash.config import InvalidDrafterError, Rope
from leadout.pairing.facts import TargetFacts

CONFIG = "config.json"
# Where multimodal models keep their text decoder.
_DECODER_SECTIONS = ("thinker_config", "text_config", "llm_config", "language_config")


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
        raise CheckpointError(
            folder,
            CONFIG,
            MISSING,
            "the folder of a Hugging Face model",
            "Check the path: it must be the folder that has the config.json.",
        )
    # Not the strict reader: configs of state-space models may contain Infinity.
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise _not_a_config(path, f"cannot be read ({problem})") from None
    if not isinstance(config, dict):
        raise _not_a_config(path, f"contains a {type(config).__name__}")
    return config


def target_from_config(
    config: Mapping[str, object], name: str, path: Path | None = None
) -> TargetFacts:
    """The facts from a config's fields, such as `to_dict()` of a transformers config.

    `path` is the file to name in errors.
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
        return None  # its model class has a default that is not in the file
    if section.get("rope_local_base_freq") is not None:
        return None  # sliding layers use another theta
    try:
        return read_rope(fields, frozenset(layer_types), max_positions or 0, path, at)
    except (CheckpointError, InvalidDrafterError):
        return None


def _mapping(value: object) -> Mapping[str, object] | None:
    return value if isinstance(value, dict) and value else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _not_a_config(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        path,
        "file",
        Phrase(problem),
        "the JSON object of a Hugging Face model",
        "Check the path of the target, or download it again.",
    )
