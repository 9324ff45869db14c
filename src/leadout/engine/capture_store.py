"""What a server keeps of its traffic: a folder of samples, each file named by when it was begun.

    capture/
      capture.json                                     which target served
      traffic-20260131T093000.000000-4711.jsonl        samples, oldest first

A sample's id begins with the time at which its request ended, so that ids sort by time. Token ids
of a target mean nothing to another one: a folder is of one target.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from leadout.models import fingerprint, local_folder
from leadout.shards import Sample, ShardError

INFO = "capture.json"
SOURCE = "traffic"  # of every captured sample
_SEGMENT = re.compile(r"traffic-[0-9]{8}T[0-9]{6}\.[0-9]{6}-[0-9]+\.jsonl")


class CaptureInfo(BaseModel):
    """Which target answered."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str  # the last part of its name
    target_fingerprint: str


def segments(folder: Path) -> list[Path]:
    """The files of samples, oldest first; a writer may still be adding to the last ones."""
    return sorted(path for path in folder.iterdir() if _SEGMENT.fullmatch(path.name))


def segment_name(begun: datetime, process: int) -> str:
    """`begun` is in UTC."""
    return f"traffic-{begun:%Y%m%dT%H%M%S.%f}-{process}.jsonl"


def sample_id(ended: datetime, request: str) -> str:
    """`ended` is in UTC."""
    return f"{ended:%Y-%m-%dT%H:%M:%S.%f}/{request}"


def read_info(folder: Path) -> CaptureInfo:
    path = folder / INFO
    try:
        return CaptureInfo.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ShardError(
            f"{path}: found nothing, wanted the traffic of a server; name the folder given to "
            "`leadout serve --capture`"
        ) from None
    except ValidationError as problem:
        first = problem.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "content"
        raise ShardError(
            f"{path}: {field}: {first['msg']}; wanted the file as `leadout serve --capture` "
            "writes it; capture into a new folder"
        ) from None


# Which target captured traffic is of.


def about_target(model: str) -> CaptureInfo:
    return CaptureInfo(
        target=model.rstrip("/").rpartition("/")[2],
        target_fingerprint=fingerprint(local_folder(model)),
    )


# The files of captured traffic: readable by their owner only, bounded in bytes and age.
#
# Samples go to one segment until it is large or old enough, then to a new one; whole segments are
# deleted, oldest first. Segments of other processes in the folder count as well.

SEGMENT_BYTES = 8 << 20
SEGMENT_SECONDS = 3600.0
PARTS = 8  # a bound is kept to this part of it: so much is deleted at once


class Segments:
    """Adds samples to a folder. Nothing is written before the first one."""

    def __init__(
        self,
        folder: Path,
        about: Callable[[], CaptureInfo],
        *,
        most_bytes: int,
        most_seconds: float,
    ) -> None:
        self._folder = folder
        self._about = about
        self._most_bytes = most_bytes
        self._most_seconds = most_seconds
        self._segment_bytes = min(SEGMENT_BYTES, most_bytes // PARTS)
        self._segment_seconds = min(SEGMENT_SECONDS, most_seconds / PARTS)
        self._open: _Segment | None = None
        self._is_prepared = False

    def add(self, sample: Sample) -> None:
        """Write one line; after an OSError nothing of it is in the file."""
        line = sample.model_dump_json().encode() + b"\n"
        self.tidy(room_for=len(line))
        if self._open is None:
            if not self._is_prepared:
                self._prepare()
            self._delete_old(self._most_bytes - max(self._segment_bytes, len(line)))
            self._open = _Segment(self._folder)
        try:
            self._open.write(line)
        except OSError:
            self.close()
            raise

    def tidy(self, room_for: int = 0) -> None:
        """End a segment that is full or old, and delete what is too old."""
        if self._open is not None and (
            self._open.size + room_for > max(self._segment_bytes, room_for)
            or time.monotonic() - self._open.begun > self._segment_seconds
        ):
            self.close()
        if room_for == 0:
            self._delete_old(self._most_bytes)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _prepare(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = self._about()
        if (self._folder / INFO).exists():
            require_same_target(self._folder, about)
        else:
            partial = self._folder / f".{INFO}.{os.getpid()}"
            partial.unlink(missing_ok=True)  # of a process with this number that was killed
            handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(about.model_dump_json(indent=2) + "\n")
            partial.replace(self._folder / INFO)
        self._is_prepared = True

    def _delete_old(self, most_bytes: int) -> None:
        if not self._folder.is_dir():
            return
        mine = None if self._open is None else self._open.path
        oldest_first = [path for path in segments(self._folder) if path != mine]
        total = 0 if self._open is None else self._open.size
        found: list[tuple[Path, os.stat_result]] = []
        for path in oldest_first:
            with suppress(FileNotFoundError):  # another process was faster
                found.append((path, path.stat()))
        total += sum(stat.st_size for _, stat in found)
        for path, stat in found:
            if total > most_bytes or time.time() - stat.st_mtime > self._most_seconds:
                path.unlink(missing_ok=True)
                total -= stat.st_size


class _Segment:
    def __init__(self, folder: Path) -> None:
        self.path = folder / segment_name(datetime.now(UTC), os.getpid())
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._handle = os.open(self.path, flags, 0o600)
        self.begun = time.monotonic()
        self.size = 0

    def write(self, line: bytes) -> None:
        written = os.write(self._handle, line)
        if written == len(line):
            self.size += written
            return
        os.ftruncate(self._handle, self.size)
        raise OSError(f"{self.path}: wrote {written} of {len(line)} bytes; is the disk full?")

    def close(self) -> None:
        os.close(self._handle)
        if self.size == 0:
            self.path.unlink(missing_ok=True)


def require_same_target(folder: Path, about: CaptureInfo) -> None:
    """A folder of captured traffic is of one target."""
    found = read_info(folder)
    if found.target_fingerprint != about.target_fingerprint:
        raise ShardError(
            f"--capture {folder}: found traffic of {found.target} (fingerprint "
            f"{found.target_fingerprint[:12]}), wanted {about.target} "
            f"({about.target_fingerprint[:12]}); capture into a new folder"
        )
