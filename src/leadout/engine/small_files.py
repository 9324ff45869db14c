"""Small files that carry counters from vLLM's engine process to its API process.

vLLM's own messages between the two have no field for them. The engine process writes a file about
once a second, the API process reads it on demand; both derive its name from vLLM's instance id.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

_Model = TypeVar("_Model", bound=BaseModel)


def small_file(kind: str, instance: str, engine: int) -> Path:
    return Path(tempfile.gettempdir()) / f"leadout-{kind}-{os.getuid()}-{instance}-{engine}.json"


def write_small(content: BaseModel, path: Path) -> None:
    """Replace the file, so that a reader never sees half of it.

    Unlike `leadout.files.write_text` it does not wait for the disk: the scheduler calls it between
    steps, and the file need not survive a crash.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content.model_dump_json())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_small(path: Path, kind: type[_Model]) -> _Model | None:
    """The content; None if there is no file or it cannot be parsed."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
