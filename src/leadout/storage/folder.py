"""Storage in a folder: of this machine, or of a file system that several machines share.

Files are replaced by renaming, so readers see the old or the new one. Compare-and-set holds the
lock file `.lock` of the folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from leadout.files import (
    MAX_MIB,
    Timeout,
    flush_to_disk,
    lock,
    read_bytes,
    read_lines,
    replacing,
    require_writable,
)
from leadout.leftovers import MAX_WRITE_SECONDS, remove_abandoned, temporary_folder
from leadout.storage.base import (
    Entry,
    Storage,
    Stored,
    require_hash,
    require_names,
)

LOCK = ".lock"
# A write takes milliseconds. A process that is stopped while it writes must not stop all others:
# a server goes on without its line in the ledger, a learner fails and is started again or, if it
# learns from served states, tries again.
LOCK_SECONDS = 60.0


class FolderStorage(Storage):
    def __init__(self, folder: str | Path) -> None:
        super().__init__(str(folder))
        self.folder = Path(folder)

    def read(self, name: str, max_mib: int = MAX_MIB) -> Stored | None:
        path = self.folder / name
        if not path.exists():
            return None
        content = read_bytes(path, max_mib)
        return Stored(content, hashlib.sha256(content).hexdigest())

    def write(self, name: str, content: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content)

    def delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def entries(self, folder: str = "") -> list[Entry]:
        root, found = self.folder / folder, []
        for parent, _, names in _walk(root) if root.is_dir() else ():
            for path in (parent / name for name in names):
                with suppress(FileNotFoundError):  # another process has just removed it
                    if path.is_file():
                        stat = path.stat()
                        name = path.relative_to(root).as_posix()
                        found.append(Entry(name, stat.st_size, stat.st_mtime))
        return sorted(found)

    def append(self, log: str, line: bytes) -> None:
        """Add a line; a killed writer leaves at most a torn one, after which a new line begins."""
        path = self.folder / log
        with self._locked():
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                size = os.fstat(handle).st_size
                if size > 0 and os.pread(handle, 1, size - 1) != b"\n":
                    line = b"\n" + line
                if os.write(handle, line) != len(line):
                    raise OSError(f"{path}: only part of a line was written; is the disk full?")
                os.fsync(handle)
            finally:
                os.close(handle)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = self.folder / LOCK
        held = lock(path, LOCK_SECONDS)
        try:
            held.acquire()
        except Timeout:
            raise TimeoutError(
                f"{path} has been held by another process for {LOCK_SECONDS:.0f} s; find out "
                "whether it was stopped in the middle of a write"
            ) from None
        try:
            yield
        finally:
            held.release()

    def lines(self, log: str) -> list[bytes]:
        path = self.folder / log
        return [line.removesuffix(b"\n") for line in read_lines(path)] if path.exists() else []

    @contextmanager
    def staging(self, parent: str) -> Iterator[Path]:
        """On the same file system, so that a rename adds the folder."""
        folder = self.folder / parent
        folder.mkdir(parents=True, exist_ok=True)
        self.remove_leftovers()
        for path in folder.glob(".partial-*"):  # the names of an earlier release
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > MAX_WRITE_SECONDS:
                    shutil.rmtree(path)
        with temporary_folder(folder / "version") as partial:
            yield partial

    def add_folder(self, staged: Path, folder: str, last: str) -> bool:
        path = self.folder / folder
        staged.chmod(0o755)
        try:
            staged.rename(path)
        except OSError:
            # A rename never replaces a folder with files in it.
            if not path.exists():
                raise
            return False
        flush_to_disk(path.parent)
        return True

    def fetch(self, folder: str, hashes: Mapping[str, str], last: str) -> Path:
        path = self.local_path(folder)
        require_names({each.name for each in path.iterdir()} - {last}, set(hashes), str(path))
        for name, digest in hashes.items():
            require_hash(path / name, digest, str(path / name))
        return path

    def local_path(self, folder: str) -> Path:
        return self.folder / folder

    def remove_leftovers(self) -> None:
        for folder, _, _ in _walk(self.folder) if self.folder.is_dir() else ():
            remove_abandoned(folder)

    def require_writable(self, flag: str) -> None:
        require_writable(flag, self.folder)


def _walk(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """As `os.walk`, which passes over all errors.

    Here only folders are passed over that disappear meanwhile, and those below `root` that other
    users keep to themselves while they write them.
    """

    def report(problem: OSError) -> None:
        is_private = isinstance(problem, PermissionError) and problem.filename != str(root)
        if not (is_private or isinstance(problem, FileNotFoundError)):
            raise problem

    for folder, folders, files in os.walk(root, onerror=report):
        yield Path(folder), folders, files
