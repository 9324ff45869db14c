"""Counters of a running server: sums over the last minute, and files that carry them.

vLLM's own messages between its processes have no field for Leadout's counters. The engine process
writes a small file about once a second, the API process reads it on demand; both derive its name
from vLLM's instance id.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter, deque
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

WINDOW_SECONDS = 60

_Model = TypeVar("_Model", bound=BaseModel)
Key = TypeVar("Key", bound=Hashable)


class SlidingWindow(Generic[Key]):
    """Sums of named counts over the last `WINDOW_SECONDS`, which expire second by second.

    The time is an argument everywhere: seconds of any clock that does not go back.
    """

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, Counter[Key]]] = deque()  # one for each second with counts
        self._total: Counter[Key] = Counter()

    def add(self, now: float, counts: Mapping[Key, int]) -> None:
        self._drop_expired(now)
        if not self._buckets or self._buckets[-1][0] < int(now):
            self._buckets.append((int(now), Counter()))
        self._buckets[-1][1].update(counts)
        self._total.update(counts)

    def total(self, now: float) -> Counter[Key]:
        """The counts of the window; a key that was never counted is 0."""
        self._drop_expired(now)
        return self._total

    def _drop_expired(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] <= int(now) - WINDOW_SECONDS:
            self._total.subtract(self._buckets.popleft()[1])


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
