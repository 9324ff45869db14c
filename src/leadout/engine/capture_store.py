"""Captured traffic on the disk: private files of samples, bounded in size and age.

    capture/
      capture.json                                     the target that served the traffic
      traffic-20260131T093000.000000-4711.jsonl        a segment: samples, oldest first

A segment is named after its start time and the process that writes it. A sample's id begins
with the time at which its request ended, so ids sort by time. Samples are token ids, which only
mean something to the target they came from: a folder belongs to one target. With a key, lines are
encrypted (`leadout.sealed`).
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from leadout.files import FileError, first_problem, write_text
from leadout.models import fingerprint
from leadout.shards import Sample, ShardError
from leadout.storage import Storage, open_storage

INFO = "capture.json"
SOURCE = "traffic"  # `source` of every captured sample
_SEGMENT = re.compile(r"traffic-[0-9]{8}T[0-9]{6}\.[0-9]{6}-[0-9]+\.jsonl")

MAX_SEGMENT_BYTES = 8 << 20
MAX_SEGMENT_SECONDS = 3600.0
# Whole segments are deleted, so a segment is at most this fraction of a limit.
MIN_SEGMENTS_PER_LIMIT = 8
CLOSED = -1  # no file has this descriptor: writing to it fails


class CaptureInfo(BaseModel):
    """The target whose traffic a folder holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str  # last part of its name
    target_fingerprint: str


def info_of_target(model: str, folder: Path) -> CaptureInfo:
    return CaptureInfo(
        target=model.rstrip("/").rpartition("/")[2], target_fingerprint=fingerprint(folder)
    )


_REMEDY = "The file is not as `leadout serve --capture` writes it; capture into a new folder."


def read_info(place: Path | str | Storage) -> CaptureInfo:
    storage = place if isinstance(place, Storage) else open_storage(str(place))
    path = storage.where(INFO)
    try:
        stored = storage.read(INFO)
        if stored is None:
            raise ShardError(
                f"{path} does not exist. Name the folder that was given to `leadout serve "
                "--capture`, or the URL of --capture-upload."
            )
        return CaptureInfo.model_validate_json(stored.content)
    except FileError as problem:
        raise ShardError(f"{problem} {_REMEDY}") from None
    except ValidationError as problem:
        raise ShardError(f"{path}: {first_problem(problem)}. {_REMEDY}") from None


def require_same_target(place: Path | Storage, info: CaptureInfo, flag: str = "--capture") -> None:
    """Refuse a place with the traffic of another target."""
    existing = read_info(place)
    if existing.target_fingerprint != info.target_fingerprint:
        where = place.address if isinstance(place, Storage) else place
        raise ShardError(
            f"{flag} {where} holds traffic of {existing.target} (fingerprint "
            f"{existing.target_fingerprint[:12]}), not of {info.target} "
            f"({info.target_fingerprint[:12]}). Capture into a new folder."
        )


def segment_paths(folder: Path) -> list[Path]:
    """The segments of a folder, oldest first; servers may still be writing to the last ones."""
    return sorted(path for path in folder.iterdir() if is_segment(path.name))


def is_segment(name: str) -> bool:
    return _SEGMENT.fullmatch(name) is not None


def segment_name(started: datetime, process: int) -> str:
    """`started` is in UTC."""
    return f"traffic-{started:%Y%m%dT%H%M%S.%f}-{process}.jsonl"


def segment_start(name: str) -> float | None:
    """The Unix time in the name of a segment; None if it is no time."""
    try:
        started = datetime.strptime(name.split("-")[1], "%Y%m%dT%H%M%S.%f")
    except (IndexError, ValueError):
        return None
    return started.replace(tzinfo=UTC).timestamp()


def sample_id(ended: datetime, request: str) -> str:
    """`ended` is in UTC."""
    return f"{ended:%Y-%m-%dT%H:%M:%S.%f}/{request}"


class SegmentWriter:
    """Adds samples to a folder, which it creates with the first one.

    A segment is closed when it is large or old enough; whole segments are deleted, oldest first, to
    stay within the limits. Segments of other processes in the same folder count too.
    """

    def __init__(
        self,
        folder: Path,
        info: Callable[[], CaptureInfo],
        *,
        max_bytes: int,
        max_seconds: float,
        seal: Callable[[bytes], bytes] = lambda line: line,
    ) -> None:
        """`info` is called with the first sample: a target's fingerprint takes time.

        `seal` encrypts a line.
        """
        self._folder, self._info, self._seal = folder, info, seal
        self._max_bytes, self._max_seconds = max_bytes, max_seconds
        self._segment_bytes = min(MAX_SEGMENT_BYTES, max_bytes // MIN_SEGMENTS_PER_LIMIT)
        self._segment_seconds = min(MAX_SEGMENT_SECONDS, max_seconds / MIN_SEGMENTS_PER_LIMIT)
        self._segment: _Segment | None = None
        self._is_prepared = False

    def add(self, sample: Sample) -> None:
        """Write one line; after an OSError no part of it is in the file."""
        line = self._seal(sample.model_dump_json().encode() + b"\n")
        self._close_if_done(len(line))
        if self._segment is None:
            self._prepare_folder()
            self._delete_oldest(self._max_bytes - max(self._segment_bytes, len(line)))
            self._segment = _Segment(self._folder)
        try:
            self._segment.write(line)
        except OSError:
            with suppress(OSError):  # the first error says more
                self.close()
            raise

    def expire(self) -> None:
        """Enforce the limits; to be called now and then, also without traffic."""
        try:
            self._close_if_done(0)
        finally:
            self._delete_oldest(self._max_bytes)

    def close(self) -> None:
        segment, self._segment = self._segment, None  # given up even if closing it fails
        if segment is not None:
            segment.close()

    def _close_if_done(self, next_bytes: int) -> None:
        if self._segment is not None and (
            self._segment.size + next_bytes > max(self._segment_bytes, next_bytes)
            or time.monotonic() - self._segment.started > self._segment_seconds
        ):
            self.close()

    def _prepare_folder(self) -> None:
        if self._is_prepared:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = self._info()
        if (self._folder / INFO).exists():
            require_same_target(self._folder, info)
        else:
            write_text(self._folder / INFO, info.model_dump_json(indent=2) + "\n", mode=0o600)
        self._is_prepared = True

    def _delete_oldest(self, max_bytes: int) -> None:
        """Delete closed segments until those left, and the open one, fit into `max_bytes`."""
        if not self._folder.is_dir():
            return
        total = 0 if self._segment is None else self._segment.size
        closed: list[tuple[Path, os.stat_result]] = []
        for path in segment_paths(self._folder):
            if self._segment is None or path != self._segment.path:
                with suppress(FileNotFoundError):  # another process has deleted it
                    closed.append((path, path.stat()))
        total += sum(stat.st_size for _, stat in closed)
        kept: list[str] = []
        for path, stat in closed:
            if total > max_bytes or time.time() - stat.st_mtime > self._max_seconds:
                try:
                    path.unlink(missing_ok=True)
                except OSError as problem:
                    kept.append(f"{path} cannot be deleted: {problem.strerror}")
                    continue
                total -= stat.st_size
        if kept:
            more = f" (and {len(kept) - 1} more files)" if len(kept) > 1 else ""
            raise OSError(kept[0] + more)


class _Segment:
    """A file that only its owner can read, and that only ever holds whole lines."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / segment_name(datetime.now(UTC), os.getpid())
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._handle = os.open(self.path, flags, 0o600)
        with suppress(OSError):  # no locks here: then nothing is uploaded from here either
            # It waits: an uploader may hold the lock while it finds out that the file is empty.
            fcntl.flock(self._handle, fcntl.LOCK_EX)
        self.started = time.monotonic()
        self.size = 0

    def write(self, line: bytes) -> None:
        written = os.write(self._handle, line)
        if written == len(line):
            self.size += written
            return
        os.ftruncate(self._handle, self.size)
        raise OSError(f"{self.path}: wrote {written} of {len(line)} bytes; is the disk full?")

    def close(self) -> None:
        # The system frees the number of the descriptor even if it reports an error. The number may
        # belong to another file a moment later, so it is forgotten before anything can fail.
        handle, self._handle = self._handle, CLOSED
        try:
            os.close(handle)
        finally:
            if self.size == 0:
                self.path.unlink(missing_ok=True)
