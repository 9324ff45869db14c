"""Strict, bounded reading of config.json files and their fields.

A field that could change the computation must be understood, or the file is refused. All other
unknown fields are kept and written back on conversion.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leadout.checkpoints.errors import CheckpointError, Phrase, missing
from leadout.dflash.config import InvalidDrafterError
from leadout.files import MAX_NESTING, is_deeper

JsonObject: TypeAlias = dict[str, object]

MAX_FILE_BYTES = 8 * 2**20
_MAX_INTEGER = 2**63


def read_json_object(path: Path) -> JsonObject:
    """The object in a UTF-8 JSON file; repeated keys, NaN and infinity are errors."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _not_json(path, f"has {path.stat().st_size} bytes")
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise _not_json(path, f"cannot be read ({problem})") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_finite_float,
            parse_float=_finite_float,
            parse_int=_bounded_int,
        )
    except RecursionError:
        raise _not_json(path, "is nested too deeply") from None
    except json.JSONDecodeError as problem:
        raise _not_json(path, f"is not valid JSON ({problem})") from None
    except ValueError as problem:  # from the hooks above
        raise _not_json(path, str(problem)) from None
    if not isinstance(value, dict):
        raise _not_json(path, f"contains a {type(value).__name__}")
    if is_deeper(value, MAX_NESTING):
        raise _not_json(path, f"is nested deeper than {MAX_NESTING} levels")
    try:  # an escaped surrogate passes the parser, but cannot be encoded or printed
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as problem:
        raise _not_json(path, f"is not valid UTF-8 ({problem})") from None
    return value


def _not_json(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        path,
        "file",
        Phrase(problem),
        f"a UTF-8 JSON object of at most {MAX_FILE_BYTES} bytes with unique keys and finite "
        "numbers",
        "Repair the file or download it again.",
    )


def _unique_keys(pairs: list[tuple[str, object]]) -> JsonObject:
    result: JsonObject = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"repeats the key {key!r}")
        result[key] = value
    return result


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"contains the number {text}")
    return value


def _bounded_int(text: str) -> int:
    # A number of thousands of digits is slow to parse and fits no field.
    if len(text) > len(str(_MAX_INTEGER)) + 1 or abs(int(text)) > _MAX_INTEGER:
        raise ValueError(f"contains an integer of {len(text)} digits")
    return int(text)


class StrictFields(BaseModel):
    """Base of config sections: a bool or string is not accepted as a number."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")


# The upper bounds are far above every known model; they keep an absurd file from being built.
Layers = Annotated[int, Field(ge=1, le=1000)]
Width = Annotated[int, Field(ge=1, le=2**20)]
Heads = Annotated[int, Field(ge=1, le=2**14)]
Rows = Annotated[int, Field(ge=1, le=2**24)]
TokenId = Annotated[int, Field(ge=0, le=2**24)]
Positions = Annotated[int, Field(ge=1, le=2**30)]
Block = Annotated[int, Field(ge=2, le=2**12)]
Epsilon = Annotated[float, Field(gt=0.0, lt=1.0)]
Multiplier = Annotated[float, Field(gt=0.0, le=1e6)]
LayerIds = Annotated[list[Annotated[int, Field(ge=0, le=1000)]], Field(min_length=1, max_length=64)]
LayerTypes = Annotated[list[str], Field(min_length=1, max_length=1000)]

# Fields of transformers, of training and of publishing that no reader computes with.
INERT = frozenset(
    {
        "_attn_implementation", "_commit_hash", "_name_or_path", "attention_dropout",
        "attn_implementation", "backbone_rotary_base", "bos_token_id", "chunk_size_feed_forward",
        "eos_token_id", "initializer_range", "is_encoder_decoder", "loss_decay_gamma",
        "max_anchors", "name_or_path", "num_anchors", "output_attentions", "output_hidden_states",
        "pad_token_id", "pretraining_tp", "return_dict", "tie_word_embeddings", "use_cache",
    }
)  # fmt: skip

# Rewritten on every write. `auto_map` names code, which is never run or copied.
REWRITTEN = frozenset({"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"})

# An unknown field is assumed to affect the computation if a word of its name starts like these.
COMPUTING_WORDS = (
    "act", "anchor", "attention", "attn", "aux", "bias", "bidirectional", "block", "capping",
    "causal", "conv", "depth", "dflash", "eagle", "embed", "expert", "factor", "fusion", "gat",
    "head", "hidden", "interleav", "key", "kv", "latent", "layer", "logit", "lora", "markov",
    "mask", "mixer", "mlp", "moe", "mrope", "mscale", "mtp", "multiplier", "neox", "norm",
    "position", "proj", "qk", "qkv", "quant", "query", "rank", "residual", "rope", "rotary",
    "router", "scal", "select", "sink", "sliding", "soft", "swa", "value", "vocab", "width",
    "window",
)  # fmt: skip

Section = TypeVar("Section", bound=StrictFields)
Value = TypeVar("Value")


def validated(model: type[Section], section: Mapping[str, object], path: Path, at: str) -> Section:
    """Validate the known fields of a section; `at` is its key in the file, "" for the top level."""
    try:
        return model.model_validate(section)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        field = ".".join([part for part in (at, *map(str, first["loc"])) if part])
        if first["type"] == "extra_forbidden":
            raise unknown_field(path, field, first["input"]) from None
        if first["type"] == "missing":
            raise missing(path, field, "a value", "Write the field explicitly.") from None
        expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        raise CheckpointError(path, field, first["input"], expected, "Correct the field.") from None


def keep_inert(extras: Mapping[str, object] | None, path: Path, at: str) -> JsonObject:
    """The unknown fields to write back; those that may affect the computation are refused."""
    kept: JsonObject = {}
    for name, value in (extras or {}).items():
        if name in REWRITTEN:
            continue
        switched_off = value is None or value is False or value in ("", [], {})
        if name not in INERT and not switched_off and _may_affect_computation(name):
            raise unknown_field(path, f"{at}.{name}" if at else name, value)
        kept[name] = value
    return kept


def unknown_field(path: Path, field: str, value: object) -> CheckpointError:
    return CheckpointError(
        path,
        field,
        value,
        "only known DFlash fields",
        "It may change what the drafter computes; remove it if you are sure that it does not.",
    )


def agreed(path: Path, field: str, one: Value | None, other: Value | None) -> Value | None:
    """A value that a file may state in two places; different values are an error."""
    if one is not None and other is not None and one != other:
        raise CheckpointError(
            path, field, one, f"{other!r} as in the other place", "Remove one of the two."
        )
    return other if one is None else one


@contextmanager
def naming_the_file(path: Path, names: Mapping[str, str]) -> Iterator[None]:
    """Report an invalid drafter config as an error about the file, with the file's field names."""
    try:
        yield
    except InvalidDrafterError as problem:
        raise CheckpointError(
            path,
            names.get(problem.field, problem.field),
            problem.value,
            problem.expected,
            "Correct the field, or download the checkpoint again.",
        ) from None


def _may_affect_computation(name: str) -> bool:
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()
    return any(word.startswith(COMPUTING_WORDS) for word in re.split(r"[^a-z]+", spaced))
