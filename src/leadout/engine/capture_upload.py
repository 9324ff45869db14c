"""Upload of captured traffic: finished segments move from the capture folder to a store.

Samples are written to the local folder first, line by line, which no object store can do. A
finished segment is uploaded under its own name and deleted here once the store has it. What could
not be uploaded, because the store is unreachable or the server was killed, stays in the folder and
is uploaded later, also by the next server that captures into it.
"""

from __future__ import annotations

import fcntl
import logging
import re
import secrets
import threading
import time
from pathlib import Path

from leadout.engine.capture_store import (
    INFO,
    is_segment,
    read_info,
    require_same_target,
    segment_paths,
    segment_start,
)
from leadout.engine.fail_safe import LimitedLog
from leadout.storage import Storage, StorageError

SECONDS_BETWEEN_UPLOADS = 10.0
MAX_NAMES = 10  # that are tried for one segment
SECONDS_BETWEEN_DELETIONS = 60.0  # unless something was moved


class SegmentUploader:
    """Moves the finished segments of a folder to a store."""

    def __init__(
        self, folder: Path, storage: Storage, *, max_bytes: int, max_seconds: float
    ) -> None:
        """The limits are those of the store, for the segments of all servers together."""
        self._folder, self._storage = folder, storage
        self._max_bytes, self._max_seconds = max_bytes, max_seconds
        self._next_deletion = time.monotonic()
        self._log = LimitedLog(logging.WARNING)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leadout-upload", daemon=True)

    def start(self) -> None:
        """Upload from now on, in a thread."""
        self._thread.start()

    def close(self, seconds: float = 5.0) -> None:
        """Upload what is finished, as far as that is possible within `seconds`."""
        self._end.set()
        self._thread.join(seconds)

    def upload(self) -> int:
        """Move all finished segments; returns how many.

        A segment that cannot be read stays, and is reported once the others have been moved. After
        an error of the store all the rest stays. The limits of the store are kept in any case.
        """
        moved, problems = 0, []
        try:
            for path in segment_paths(self._folder) if self._folder.is_dir() else ():
                try:
                    moved += self._upload(path)
                except StorageError:
                    raise
                except OSError as problem:
                    problems.append(problem)
        finally:
            if moved or time.monotonic() >= self._next_deletion:
                self._next_deletion = time.monotonic() + SECONDS_BETWEEN_DELETIONS
                self._delete_oldest()
        if problems:
            raise problems[0]
        return moved

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._end.wait(SECONDS_BETWEEN_UPLOADS)
            try:
                self.upload()
            except Exception as error:  # the thread must live, whatever the error is
                self._log(
                    "Leadout could not upload captured traffic: %s: %s. It stays in %s, and "
                    "Leadout tries again.",
                    type(error).__name__,
                    error,
                    self._folder,
                )

    def _upload(self, path: Path) -> bool:
        """Whether the segment was finished, and has been moved."""
        try:
            file = path.open("r+b")  # NFS locks only files that are open for writing
        except FileNotFoundError:  # another process has moved or deleted it
            return False
        with file:
            try:
                # Whoever writes a segment holds this lock, and a killed process none.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            content = file.read()
            if not content or not path.exists():  # just created, or moved meanwhile
                return False
            self._require_same_target()
            self._add(path.name, content)
            path.unlink(missing_ok=True)
        return True

    def _require_same_target(self) -> None:
        """Create the store's capture.json, or compare it with the folder's."""
        if not self._storage.replace(INFO, (self._folder / INFO).read_bytes(), None):
            info = read_info(self._folder)
            require_same_target(self._storage, info, flag="--capture-upload")

    def _add(self, name: str, content: bytes) -> None:
        chosen = name
        for _ in range(MAX_NAMES):
            if self._storage.replace(chosen, content, None):
                return
            stored = self._storage.read(chosen)
            if stored is not None and stored.content == content:  # the answer was lost
                return
            # Another machine had a process of this number at the same microsecond.
            chosen = re.sub(r"-[0-9]+\.jsonl", f"-{secrets.randbelow(10**9)}.jsonl", name)
        raise StorageError(
            f"{self._storage.where(name)}: the store refused {MAX_NAMES} new names as taken; does "
            "it support If-None-Match?"
        )

    def _delete_oldest(self) -> None:
        if not (self._folder / INFO).exists():  # whose traffic the store holds is not known
            return
        self._require_same_target()
        segments = [entry for entry in self._storage.entries() if is_segment(entry.name)]
        total = sum(entry.size for entry in segments)
        for entry in segments:  # by name, so the oldest first
            started = segment_start(entry.name)  # it may have been uploaded much later
            age = time.time() - (entry.modified if started is None else started)
            if total > self._max_bytes or age > self._max_seconds:
                self._storage.delete(entry.name)
                total -= entry.size
