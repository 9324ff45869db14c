"""Counters of a running server: sums over the last minute, and files that carry them.

vLLM's own messages between its processes have no field for Leadout's counters. The engine process
writes a small file about once a second, the API process reads it on demand; both derive its name
from vLLM's instance id. The files are in a folder of the engine's process (`process_folders`), so
that other users of the machine can neither read nor forge them.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel

from leadout.engine.fail_safe import LimitedLog
from leadout.engine.process_folders import PRIVATE, claim, is_ours, private_folder, release
from leadout.files import FileError, read_model

WINDOW_SECONDS = 60
SUFFIX = ".json"

_log = LimitedLog(logging.WARNING)

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
    return private_folder() / instance / f"{kind}-{engine}{SUFFIX}"


def write_small(content: BaseModel, path: Path) -> None:
    """Replace the file, so that a reader never sees half of it.

    Unlike `leadout.files.write_text` it does not wait for the disk: the scheduler calls it between
    steps, and the file need not survive a crash.
    """
    if path.parent.parent.name == PRIVATE:
        claim(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content.model_dump_json())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def disk_errors_logged() -> Iterator[None]:
    """For files that are written again soon: an error of the disk may pass, and ends nothing."""
    try:
        yield
    except OSError as problem:
        _log("Leadout's counters cannot be written, and are out of date: %s", problem)


def read_small(path: Path, kind: type[_Model]) -> _Model | None:
    """The content; None if there is no file of ours or it cannot be parsed."""
    private = [path.parent.parent] if path.parent.parent.name == PRIVATE else []
    try:
        if not all(map(is_ours, [path.parent, *private])):
            return None
        return read_model(path, kind)
    except (FileError, OSError):
        return None


def remove_small(path: Path) -> None:
    """Remove the file, and with the last one of an engine its folder."""
    path.unlink(missing_ok=True)
    if not any(path.parent.glob(f"*{SUFFIX}")):
        release(path.parent)
