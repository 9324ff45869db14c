"""Storage in an object store, through fsspec.

    versions/0001/...                      as in a folder; the manifest is uploaded last
    ledger.jsonl/20260131T093000...        one object per line, since nothing can be appended to
    .locks/...                             objects that stand for waiting writers

Files of versions are used through a cache on the local disk, whose hashes are compared at every
use. Stores other than S3 have no conditional writes that fsspec offers: compare-and-set then holds
a lock of objects, which requires that a listing shows every object that was written before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from leadout.errors import LeadoutError
from leadout.files import MAX_MIB, FileError, Timeout, lock, replacing
from leadout.leftovers import scratch_folder
from leadout.storage.base import (
    Entry,
    Storage,
    StorageError,
    Stored,
    WrongFilesError,
    require_names,
    sha256_of,
)

LOCKS = ".locks"
# A writer holds the lock for a few requests. One that was killed or stopped loses it after this.
MAX_LOCK_SECONDS = 60.0
MAX_WAIT_SECONDS = 120.0
MAX_FETCH_SECONDS = 600.0  # for which a process waits while another one fills the cache
# Uploading a drafter takes minutes at most: what is older and incomplete is of a killed process.
MAX_UPLOAD_SECONDS = 86400.0
MAX_UNUSED_SECONDS = 7 * 86400.0  # of a version in the cache
_MODIFIED = ("LastModified", "mtime", "last_modified", "updated", "created")  # in fsspec's listings


class ObjectStorage(Storage):
    """Objects under one URL."""

    options: Mapping[str, Any] = {}  # of the fsspec file system

    def __init__(self, url: str, cache: Path | None = None) -> None:
        super().__init__(url.rstrip("/"))
        self._protocol, _, self._root = self.address.partition("://")
        name = hashlib.sha256(self.address.encode()).hexdigest()[:16]
        self._cache = cache or _cache_folder() / "registries" / name

    @property
    def fs(self) -> Any:
        """The fsspec file system."""
        try:
            return _file_system(self._protocol, json.dumps(dict(self.options)), os.getpid())
        except ImportError:
            remedy = "pip install 'leadout[s3]'" if self._protocol == "s3" else "install it"
            raise StorageError(
                f"{self.address}: the fsspec package for {self._protocol}:// is not installed "
                f"({remedy})."
            ) from None
        except ValueError as problem:
            raise StorageError(
                f"{self.address}: {problem}. Expected a folder or an s3:// URL."
            ) from None

    def read(self, name: str, max_mib: int = MAX_MIB) -> Stored | None:
        with self._errors(name):
            try:
                content: bytes = self.fs.cat_file(self._path(name))
            except FileNotFoundError:
                return None
        self._require_size(name, len(content), max_mib)
        return Stored(content, hashlib.sha256(content).hexdigest())

    def write(self, name: str, content: bytes) -> None:
        with self._errors(name):
            self.fs.pipe_file(self._path(name), content)

    def delete(self, name: str) -> None:
        with self._errors(name), suppress(FileNotFoundError):
            self.fs.rm_file(self._path(name))

    def entries(self, folder: str = "") -> list[Entry]:
        root = self._path(folder)
        with self._errors(folder):
            try:
                found = self.fs.find(root, detail=True)
            except FileNotFoundError:
                return []
        prefix = root.strip("/") + "/"
        entries = []
        for path, info in found.items():
            name = path.strip("/").removeprefix(prefix)
            if name and not path.endswith("/") and info.get("type") != "directory":
                entries.append(Entry(name, info.get("size") or 0, _modified(info)))
        return sorted(entries)

    def append(self, log: str, line: bytes) -> None:
        # By the clock of this machine: lines of two machines may be out of order by its error.
        now = datetime.now(UTC)
        self.write(f"{log}/{now:%Y%m%dT%H%M%S.%f}-{secrets.token_hex(6)}", line)

    def lines(self, log: str) -> list[bytes]:
        names = [f"{log}/{entry.name}" for entry in self.entries(log)]
        paths = [self._path(name) for name in names]
        with self._errors(log):
            found: dict[str, Any] = self.fs.cat(paths, on_error="return") if paths else {}
            by_name = {path.strip("/"): content for path, content in found.items()}
            lines = []
            for path in paths:
                content = by_name[path.strip("/")]
                if isinstance(content, Exception):
                    raise content
                lines.append(content.rstrip(b"\n"))
        return lines

    @contextmanager
    def staging(self, parent: str) -> Iterator[Path]:
        with scratch_folder() as folder:
            yield folder

    def add_folder(self, staged: Path, folder: str, last: str) -> bool:
        if self.read(f"{folder}/{last}") is not None:
            return False
        self._remove_abandoned(folder.rpartition("/")[0], last)
        for path in sorted(staged.iterdir()):
            if path.name != last:
                name = f"{folder}/{path.name}"
                with self._errors(name):
                    self.fs.put_file(str(path), self._path(name))
        content = (staged / last).read_bytes()
        if self.replace(f"{folder}/{last}", content, None):
            return True
        found = self.read(f"{folder}/{last}")  # the answer to our own write may have been lost
        return found is not None and found.content == content

    def fetch(self, folder: str, hashes: Mapping[str, str], last: str) -> Path:
        path = self.local_path(folder)
        sizes = {entry.name: entry.size for entry in self.entries(folder) if entry.name != last}
        require_names(set(sizes), set(hashes), self.where(folder))
        for name in hashes:
            if name != Path(name).name or name in ("", ".", ".."):
                raise WrongFilesError(f"{self.where(folder)}: {name!r} is not the name of a file")
        self._cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._locked_cache():
            self._remove_unused(folder)
            path.mkdir(parents=True, exist_ok=True)
            for extra in path.iterdir():
                if extra.name not in hashes:
                    extra.unlink()
            for name, digest in hashes.items():
                self._fetch_file(f"{folder}/{name}", path / name, digest, sizes[name])
            os.utime(path)
        return path

    def local_path(self, folder: str) -> Path:
        return self._cache / folder

    def require_writable(self, flag: str) -> None:
        name = f".writable-{secrets.token_hex(6)}"
        try:
            self.write(name, b"")
            self.delete(name)
        except StorageError as problem:
            raise StorageError(f"{flag} {problem}") from None

    def _fetch_file(self, name: str, path: Path, digest: str, size: int) -> None:
        if path.is_symlink():
            path.unlink()
        if path.is_file() and sha256_of(path) == digest:
            return
        for _ in range(2):  # a wrong hash may come from the transfer
            with self._errors(name), replacing(path) as temporary:
                self.fs.get_file(self._path(name), str(temporary))
            if sha256_of(path) == digest:
                return
        found = path.stat().st_size
        path.unlink()
        if found != size:
            raise StorageError(f"{self.where(name)}: received {found:,} of {size:,} bytes")
        raise WrongFilesError(
            f"{self.where(name)} changed since publishing: expected the published file (sha256 "
            f"{digest[:12]})"
        )

    @contextmanager
    def _locked_cache(self) -> Iterator[None]:
        path = self._cache / ".lock"
        held = lock(path, MAX_FETCH_SECONDS)
        try:
            held.acquire()
        except Timeout:
            raise StorageError(
                f"{path} has been held by another process for {MAX_FETCH_SECONDS:.0f} s; find out "
                "whether it was stopped while it fetched a version"
            ) from None
        try:
            yield
        finally:
            held.release()

    def _remove_unused(self, folder: str) -> None:
        """Remove versions from the cache that were deleted, or that nobody has used for long."""
        parent = folder.rpartition("/")[0]
        existing = {entry.name.partition("/")[0] for entry in self.entries(parent)}
        cached = self.local_path(parent)
        for path in cached.iterdir() if cached.is_dir() else ():
            age = time.time() - path.stat().st_mtime
            if path.name not in existing or age > MAX_UNUSED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)

    def _remove_abandoned(self, parent: str, last: str) -> None:
        """Remove what killed publishers left: folders without the last file."""
        folders: dict[str, list[Entry]] = {}
        for entry in self.entries(parent):
            folders.setdefault(entry.name.partition("/")[0], []).append(entry)
        for name, entries in folders.items():
            is_complete = any(entry.name == f"{name}/{last}" for entry in entries)
            newest = max(entry.modified for entry in entries)
            if not is_complete and time.time() - newest > MAX_UPLOAD_SECONDS:
                for entry in entries:
                    self.delete(f"{parent}/{entry.name}")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Mutual exclusion by objects: a writer adds its own, and holds the lock if it is alone.

        Of two writers, the one that lists later sees the other's object. A writer that is not alone
        takes its object back and waits.
        """
        mine = secrets.token_hex(8)
        deadline = time.monotonic() + MAX_WAIT_SECONDS
        try:
            while True:
                self.write(f"{LOCKS}/{mine}", b"")
                waiting = {entry.name: entry.modified for entry in self.entries(LOCKS)}
                # The ages of both are by the clock of the store.
                now = waiting.pop(mine, time.time())
                held = [name for name, since in waiting.items() if now - since < MAX_LOCK_SECONDS]
                if not held:
                    break
                if time.monotonic() > deadline:
                    raise StorageError(f"{self.where(LOCKS)}: {held[0]} has held the lock too long")
                self.delete(f"{LOCKS}/{mine}")
                time.sleep(random.uniform(0.02, 0.2))
            for name in waiting:  # of writers that were killed
                self.delete(f"{LOCKS}/{name}")
            yield
        finally:
            self.delete(f"{LOCKS}/{mine}")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _require_size(self, name: str, size: int, max_mib: int) -> None:
        if size > max_mib * 2**20:
            raise FileError(
                f"{self.where(name)} has {size:,} bytes, expected at most {max_mib} MiB."
            )

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Whatever a store's package raises, as one kind of error."""
        try:
            yield
        except LeadoutError:
            raise
        except Exception as problem:
            lines = str(problem).strip().splitlines() or [type(problem).__name__]
            raise StorageError(f"{self.where(name)}: {lines[0]}") from problem


@lru_cache
def _file_system(protocol: str, options: str, process: int) -> Any:
    """One for each process, since none survives a fork.

    Not by fsspec's own cache, which has one for each thread and keeps them all.
    """
    import fsspec

    settings = {"use_listings_cache": False, "skip_instance_cache": True, **json.loads(options)}
    return fsspec.filesystem(protocol, **settings)


def _modified(info: Mapping[str, Any]) -> float:
    for key in _MODIFIED:
        value = info.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            return datetime.fromisoformat(value).timestamp()
    return time.time()


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "leadout"
