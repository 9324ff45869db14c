"""Reading JSON that came from somewhere else: bounded, and without the usual leniencies."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NoReturn, TypeAlias

from leadout.checkpoints.errors import CheckpointError, Words

JsonObject: TypeAlias = dict[str, object]

LARGEST_FILE = 8 * 2**20
DEEPEST_NESTING = 64
_LARGEST_INTEGER = 2**63


def read_json_object(path: Path) -> JsonObject:
    """The object in a UTF-8 JSON file; twice the same key, NaN or infinity are errors."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise _not_json(path, f"{path.stat().st_size} bytes")
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise _not_json(path, str(problem)) from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_bounded_int,
        )
    except RecursionError:
        raise _not_json(path, "nesting without end") from None
    except ValueError as problem:  # JSONDecodeError is one too
        raise _not_json(path, str(problem)) from None
    if not isinstance(value, dict):
        raise _not_json(path, f"a {type(value).__name__}")
    if _deeper_than(value, DEEPEST_NESTING):
        raise _not_json(path, f"nesting deeper than {DEEPEST_NESTING}")
    try:  # an escaped half of a character passes the parser, but could never be written or shown
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as problem:
        raise _not_json(path, str(problem)) from None
    return value


def _not_json(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        path,
        "file",
        Words(found),
        f"a JSON object in UTF-8 of at most {LARGEST_FILE} bytes, every key once, finite numbers",
        "Repair the file or download it again.",
    )


def _unique_keys(pairs: list[tuple[str, object]]) -> JsonObject:
    result: JsonObject = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} twice")
        result[key] = value
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name}")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text}")
    return value


def _bounded_int(text: str) -> int:
    # A number of thousands of digits is slow to parse and fits no field.
    if len(text) > len(str(_LARGEST_INTEGER)) + 1 or abs(int(text)) > _LARGEST_INTEGER:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _deeper_than(value: object, limit: int) -> bool:
    level: list[object] = [value]
    for _ in range(limit):
        nested = [item for item in level if isinstance(item, dict | list)]
        if not nested:
            return False
        level = [
            child
            for item in nested
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return any(isinstance(item, dict | list) for item in level)
