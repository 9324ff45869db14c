"""What was decided about the versions of a registry, and why: one line each, never changed.

Learners and servers on several machines add to the same file. A line is added by one write under a
lock, and is on the disk before `append` returns; a killed writer leaves at most a torn line, after
which the next one begins a new line, and which readers pass over.
"""

from __future__ import annotations

import fcntl
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leadout.checkpoints.errors import CheckpointError

LEDGER = "ledger.jsonl"

Event = Literal["published", "promoted", "rejected", "swapped", "refused", "rolled_back", "started"]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Entry(BaseModel):
    """One decision."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    when: str = Field(default_factory=_now)  # date and time, UTC
    event: Event
    version: int | None
    why: str
    evidence: dict[str, float | int | str | bool] = {}


def append(registry_folder: Path, entry: Entry) -> None:
    """Add a line; OSError if the folder cannot be written."""
    line = entry.model_dump_json().encode() + b"\n"
    handle = os.open(registry_folder / LEDGER, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if _ends_torn(handle):
            line = b"\n" + line
        if os.write(handle, line) != len(line):
            raise OSError(f"{registry_folder / LEDGER}: wrote a part of a line; is the disk full?")
        os.fsync(handle)
    finally:
        os.close(handle)


def read_ledger(folder: Path) -> list[Entry]:
    """All entries, oldest first; empty without a ledger. Torn lines are passed over."""
    path = folder / LEDGER
    if not path.exists():
        return []
    return [
        entry
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1)
        if (entry := _parse(line, path, number)) is not None
    ]


def _parse(line: bytes, path: Path, number: int) -> Entry | None:
    if not line.endswith(b"}"):  # nothing, or what a killed writer left
        return None
    try:
        return Entry.model_validate_json(line)
    except ValidationError as problem:
        first = problem.errors()[0]
        if first["type"] == "json_invalid":  # torn within a nested object
            return None
        field = ".".join(str(part) for part in first["loc"]) or "line"
        raise CheckpointError(
            path,
            f"line {number}, {field}",
            first.get("input"),
            f"an entry as Leadout writes it ({first['msg'].lower()})",
            "Move the ledger elsewhere; a new one is begun.",
        ) from None


def _ends_torn(handle: int) -> bool:
    size = os.fstat(handle).st_size
    return size > 0 and os.pread(handle, 1, size - 1) != b"\n"
