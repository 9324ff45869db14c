"""What was decided about the versions of a registry, and why: one line each, never changed.

Learners and servers on several machines add to the same file. A line is added by one write under a
lock, and is on the disk before `append` returns; a killed writer leaves at most a torn line, after
which the next one begins a new line, and which readers pass over.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leadout.checkpoints.errors import NOTHING, CheckpointError, Words
from leadout.files import replacing
from leadout.models import fingerprint

LEDGER = "ledger.jsonl"

Event = Literal["published", "promoted", "rejected", "swapped", "refused", "rolled_back", "started"]


def _ledger_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Entry(BaseModel):
    """One decision."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    when: str = Field(default_factory=_ledger_now)  # date and time, UTC
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


# Versions of one drafter in a folder, and which of them is to be served.
#
#     registry/
#       versions/0001/            a checkpoint as any other, and its manifest, version.json
#       serving.json              the pointer: the version that every server is to run
#       marks/0002.json           why a version must not be served again
#       ledger.jsonl              what was decided, and why
#       .lock                     held while the pointer is changed
#
# A version appears by one rename, whole or not at all, and never changes afterwards. The pointer is
# one small file that is replaced by a rename, so that servers on many machines can watch it over
# shared storage.

VERSIONS, POINTER, MARKS, MANIFEST = "versions", "serving.json", "marks", "version.json"
LOCK = ".lock"
_NUMBER = re.compile(r"[0-9]{4,9}")


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Promise(_File):
    """What a version was found to accept before it was published, by kind of text."""

    acceptance_length: float
    low: float  # 95% interval
    high: float
    requests: int


class Manifest(_File):
    """What a version is; its folder's files are exactly those named here."""

    version: int
    parent: int | None  # the version whose weights training began with
    made: str  # date and time, UTC
    fingerprint: str  # of the drafter
    target_fingerprint: str
    promises: dict[str, Promise]
    files: dict[str, str]  # sha256 by name


class Pointer(_File):
    version: int
    changed: str
    reason: str


class Mark(_File):
    reason: str
    marked: str


_Read = TypeVar("_Read", bound=_File)


class Registry:
    """The versions under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def opened(cls, folder: Path) -> Self:
        """One that exists and names a version to serve."""
        registry = cls(folder)
        if registry.serving() is None:
            raise CheckpointError(
                folder,
                POINTER,
                NOTHING,
                "a registry with a version to serve",
                "Make one with `leadout learn TARGET --registry FOLDER --start DRAFTER`.",
            )
        return registry

    def publish(
        self,
        drafter: Path,
        *,
        target_fingerprint: str,
        parent: int | None = None,
        promises: Mapping[str, Promise] | None = None,
    ) -> Manifest:
        """Copy a drafter into the registry as its next version; it is not served yet."""
        versions = self.folder / VERSIONS
        versions.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=versions))
        try:
            for path in sorted(drafter.iterdir()):
                if path.is_file() and path.name != MANIFEST:
                    _copy(path, partial / path.name)
            files = {path.name: _sha256(path) for path in sorted(partial.iterdir())}
            about = fingerprint(partial)
            while True:
                manifest = Manifest(
                    version=max(self.versions(), default=0) + 1,
                    parent=parent,
                    made=_now(),
                    fingerprint=about,
                    target_fingerprint=target_fingerprint,
                    promises=dict(promises or {}),
                    files=files,
                )
                (partial / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")
                _sync(partial / MANIFEST)
                partial.chmod(0o755)
                try:
                    partial.rename(self.path(manifest.version))
                except OSError:
                    # Another publisher was faster: a folder with files in it is never replaced.
                    if not self.path(manifest.version).exists():
                        raise
                    continue
                _sync(versions)
                return manifest
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def point_to(self, version: int, reason: str) -> Pointer:
        """Name the version that servers are to run; a marked one is refused."""
        with self._locked():
            return self._point_to(version, reason)

    def roll_back(self, version: int, reason: str) -> Pointer | None:
        """Mark a version; if it is the one to serve, point to the nearest unmarked one before it.

        None if it is not, or no longer: another server was faster, or a newer one was published.
        """
        with self._locked():
            serving, pointer = self.serving(), None
            if serving is not None and serving.version == version:
                # First the pointer: it never names a marked version, wherever this is cut short.
                before = self._unmarked_ancestor(version)
                pointer = self._point_to(before, f"back from version {version}: {reason}")
            if self.mark_of(version) is None:
                self.mark(version, reason)
            return pointer

    def _point_to(self, version: int, reason: str) -> Pointer:
        self.manifest(version)
        mark = self.mark_of(version)
        if mark is not None:
            raise CheckpointError(
                self.path(version),
                "version",
                Words(f"marked: {mark.reason}"),
                "a version without a mark",
                "Point to another version, or make a new one.",
            )
        pointer = Pointer(version=version, changed=_now(), reason=reason)
        _write(self.folder / POINTER, pointer)
        return pointer

    def serving(self) -> Pointer | None:
        path = self.folder / POINTER
        return _read(path, Pointer) if path.exists() else None

    def versions(self) -> list[int]:
        """All that were published, oldest first."""
        return sorted(self._numbers())

    def path(self, version: int) -> Path:
        """Where a version lies; the only way from a number to a folder."""
        return self.folder / VERSIONS / f"{version:04d}"

    def manifest(self, version: int) -> Manifest:
        path = self.path(version) / MANIFEST
        if not path.is_file():
            raise CheckpointError(
                path,
                "version",
                NOTHING,
                f"one of {self.versions()}",
                "Name a version of this registry; `leadout learn --status` lists them.",
            )
        return _read(path, Manifest)

    def verified(self, version: int) -> Manifest:
        """The manifest of a version whose files are, byte for byte, those that were published."""
        manifest, folder = self.manifest(version), self.path(version)
        found = {path.name for path in folder.iterdir()} - {MANIFEST}
        if found != set(manifest.files):
            name = min(found ^ set(manifest.files))
            raise CheckpointError(
                folder,
                name,
                Words("an added file") if name in found else NOTHING,
                "exactly the files that were published",
                "Publish the drafter again as a new version.",
            )
        for name, digest in manifest.files.items():
            path = folder / name
            if path.is_symlink() or _sha256(path) != digest:
                raise CheckpointError(
                    path,
                    "content",
                    Words("a link" if path.is_symlink() else "other bytes"),
                    f"the published ones (sha256 {digest[:12]})",
                    "Publish the drafter again as a new version.",
                )
        return manifest

    def mark(self, version: int, reason: str) -> None:
        """Never to be served again."""
        (self.folder / MARKS).mkdir(parents=True, exist_ok=True)
        _write(self._mark_path(version), Mark(reason=reason, marked=_now()))

    def mark_of(self, version: int) -> Mark | None:
        path = self._mark_path(version)
        return _read(path, Mark) if path.exists() else None

    def _unmarked_ancestor(self, version: int) -> int:
        before = self.manifest(version).parent
        while before is not None and self.mark_of(before) is not None:
            before = self.manifest(before).parent
        if before is None:
            raise CheckpointError(
                self.path(version) / MANIFEST,
                "parent",
                NOTHING,
                "an unmarked version to go back to",
                "Publish another version and point to it.",
            )
        return before

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One change of the pointer at a time, by any process; the lock dies with its process."""
        handle = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _mark_path(self, version: int) -> Path:
        return self.folder / MARKS / f"{version:04d}.json"

    def _numbers(self) -> Iterator[int]:
        folder = self.folder / VERSIONS
        for path in folder.iterdir() if folder.is_dir() else ():
            if _NUMBER.fullmatch(path.name):
                yield int(path.name)


def _copy(source: Path, copy: Path) -> None:
    shutil.copyfile(source, copy)
    _sync(copy)


def _sync(path: Path) -> None:
    """On the disk before the rename that makes it visible."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, content: _File) -> None:
    with replacing(path) as temporary:
        temporary.write_text(content.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _read(path: Path, kind: type[_Read]) -> _Read:
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as problem:
        first = problem.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "content"
        raise CheckpointError(
            path,
            field,
            first.get("input"),
            f"a {kind.__name__.lower()} as Leadout writes it ({first['msg'].lower()})",
            "Restore the file, or begin a new registry.",
        ) from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
