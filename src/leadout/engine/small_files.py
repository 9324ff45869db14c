"""Small files that carry numbers from vLLM's engine process to its API process.

vLLM's own messages between the two have no room for more. The engine writes a file once a second,
the API process reads it when asked. Both know its name from vLLM's instance id.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

Numbers = TypeVar("Numbers", bound=BaseModel)


def small_file(kind: str, instance: str, engine: int) -> Path:
    return Path(tempfile.gettempdir()) / f"leadout-{kind}-{os.getuid()}-{instance}-{engine}.json"


def write_small(numbers: BaseModel, path: Path) -> None:
    """Aside, then renamed: a reader never sees half a file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(numbers.model_dump_json())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_small(path: Path, kind: type[Numbers]) -> Numbers | None:
    """None without a file, or with one that cannot be read."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
