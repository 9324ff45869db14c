"""A registry of drafter versions in a folder: what to serve, what never to serve again, and why.

    registry/
      versions/0001/    a checkpoint plus its manifest, version.json
      serving.json      the pointer: the version that every server should run
      marks/0002.json   marks a version as bad: it must not be served again
      ledger.jsonl      every decision with its evidence, one JSON object per line
      .lock             held while the pointer or the ledger is written

A version appears through one rename, complete or not at all, and never changes afterwards. The
pointer is one small file that is replaced atomically, so that servers on many machines can watch
it over shared storage. Learners and servers append to the same ledger.
"""

from __future__ import annotations

import hashlib
import os
import re
import reprlib
import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leadout.errors import LeadoutError
from leadout.files import flush_to_disk, lock, read_text, write_text
from leadout.models import fingerprint

VERSIONS, MARKS = "versions", "marks"
MANIFEST, POINTER, LEDGER, LOCK = "version.json", "serving.json", "ledger.jsonl", ".lock"
FIRST = 1  # the version that every later one is compared with
_VERSION_FOLDER = re.compile(r"[0-9]{4,9}")


class RegistryError(LeadoutError):
    """A registry or one of its versions cannot be used as asked."""


def _now(timespec: str = "seconds") -> str:
    return datetime.now(UTC).isoformat(timespec=timespec)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ExpectedAcceptance(_File):
    """The acceptance length of a version on one kind of text, measured before publishing."""

    acceptance_length: float
    low: float  # 95% confidence interval
    high: float
    requests: int


class Manifest(_File):
    """Describes a version; its folder holds exactly the files listed here."""

    version: int
    parent: int | None  # the version that training started from
    made: str  # UTC
    fingerprint: str  # of the drafter
    target_fingerprint: str
    promises: dict[str, ExpectedAcceptance]  # by kind of text
    files: dict[str, str]  # sha256 by file name


class Pointer(_File):
    """The version that servers should run."""

    version: int
    changed: str  # UTC
    reason: str


class BadMark(_File):
    """Why a version must not be served again."""

    reason: str
    marked: str  # UTC


Event = Literal[
    "published",
    "promoted",
    "rejected",
    "undecided",
    "swapped",
    "refused",
    "rolled_back",
    "started",
]
Evidence = Mapping[str, float | int | str | bool]


class LedgerEntry(_File):
    """One decision about a version."""

    when: str = Field(default_factory=lambda: _now("milliseconds"))  # UTC
    event: Event
    version: int | None
    why: str
    evidence: dict[str, float | int | str | bool] = {}


_AnyFile = TypeVar("_AnyFile", bound=_File)


class Registry:
    """The versions under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def versions(self) -> list[int]:
        """All published versions, oldest first."""
        folder = self.folder / VERSIONS
        names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
        return sorted(int(name) for name in names if _VERSION_FOLDER.fullmatch(name))

    def path(self, version: int) -> Path:
        """The folder of a version; the only place where a number becomes a path."""
        return self.folder / VERSIONS / f"{version:04d}"

    def manifest(self, version: int) -> Manifest:
        path = self.path(version) / MANIFEST
        if not path.is_file():
            raise RegistryError(
                f"{path} does not exist; the versions of this registry are {self.versions()} "
                "(see `leadout learn --status`)."
            )
        return _read(path, Manifest)

    def verify(self, version: int) -> Manifest:
        """The manifest of a version, after comparing every file with its published hash."""
        manifest, folder = self.manifest(version), self.path(version)
        names = {path.name for path in folder.iterdir()} - {MANIFEST}
        if names != set(manifest.files):
            name = min(names ^ set(manifest.files))
            change = "was added after" if name in names else "is missing since"
            raise RegistryError(
                f"{folder}: {name!r} {change} publishing. Publish the drafter again as a new "
                "version."
            )
        for name, digest in manifest.files.items():
            path = folder / name
            if path.is_symlink() or _sha256(path) != digest:
                change = "is a symbolic link" if path.is_symlink() else "changed since publishing"
                raise RegistryError(
                    f"{path} {change}: expected the published file (sha256 {digest[:12]}). Publish "
                    "the drafter again as a new version."
                )
        return manifest

    def first(self) -> Path:
        """The folder of the first version, which must be kept unchanged.

        Compared only with its predecessor, each version could lose a little more.
        """
        if FIRST not in self.versions():
            raise RegistryError(
                f"{self.path(FIRST)} does not exist. Every candidate is compared with version "
                f"{FIRST}, so that small losses do not add up over cycles: restore this folder, or "
                "accept the serving version as the new base line by creating another registry "
                "from it with --start."
            )
        self.verify(FIRST)
        return self.path(FIRST)

    def publish(
        self,
        drafter: Path,
        *,
        target_fingerprint: str,
        parent: int | None = None,
        expected: Mapping[str, ExpectedAcceptance] | None = None,
    ) -> Manifest:
        """Copy a drafter into the registry as its next version, without serving it yet."""
        versions = self.folder / VERSIONS
        versions.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=versions))
        try:
            for path in sorted(drafter.iterdir()):
                if path.is_file() and path.name != MANIFEST:
                    flush_to_disk(shutil.copyfile(path, partial / path.name))
            files = {path.name: _sha256(path) for path in sorted(partial.iterdir())}
            while True:
                manifest = Manifest(
                    version=max(self.versions(), default=0) + 1,
                    parent=parent,
                    made=_now(),
                    fingerprint=fingerprint(partial),
                    target_fingerprint=target_fingerprint,
                    promises=dict(expected or {}),
                    files=files,
                )
                _write(partial / MANIFEST, manifest)
                partial.chmod(0o755)
                try:
                    partial.rename(self.path(manifest.version))
                except OSError:
                    # A rename never replaces a folder with files in it, so if the folder exists,
                    # another process has published this number first.
                    if not self.path(manifest.version).exists():
                        raise
                    continue
                flush_to_disk(versions)
                return manifest
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def pointer(self) -> Pointer | None:
        path = self.folder / POINTER
        return _read(path, Pointer) if path.exists() else None

    def require_pointer(self) -> Pointer:
        """The pointer of a registry that must have one."""
        pointer = self.pointer()
        if pointer is None:
            raise RegistryError(
                f"{self.folder} is not a registry with a version to serve: {POINTER} is missing. "
                "Create one with `leadout learn TARGET --registry FOLDER --start DRAFTER`."
            )
        return pointer

    def point_to(self, version: int, reason: str) -> Pointer:
        """Set the version that servers should run; refuses one that is marked as bad."""
        with lock(self.folder / LOCK):
            return self._point_to(version, reason)

    def roll_back(self, version: int, reason: str) -> Pointer | None:
        """Mark a version as bad; if servers should run it, point to its nearest good ancestor.

        None if the pointer names another version by now: a second server came first, or a newer
        version was published.
        """
        with lock(self.folder / LOCK):
            current, pointer = self.pointer(), None
            if current is not None and current.version == version:
                # The pointer moves first: even if this is interrupted, it never names a version
                # that is marked as bad.
                ancestor = self._good_ancestor(version)
                pointer = self._point_to(ancestor, f"rolled back from version {version}: {reason}")
            if self.bad_mark(version) is None:
                self.mark_bad(version, reason)
            return pointer

    def mark_bad(self, version: int, reason: str) -> None:
        """Make sure that a version is never served again."""
        (self.folder / MARKS).mkdir(parents=True, exist_ok=True)
        _write(self._mark_path(version), BadMark(reason=reason, marked=_now()))

    def bad_mark(self, version: int) -> BadMark | None:
        path = self._mark_path(version)
        return _read(path, BadMark) if path.exists() else None

    def record(
        self, event: Event, version: int | None, why: str, evidence: Evidence | None = None
    ) -> None:
        """Append an entry to the ledger, on the disk when this returns; OSError if it cannot.

        A writer that is killed leaves at most one torn line. The next writer starts a new line
        after it, and readers skip it.
        """
        entry = LedgerEntry(event=event, version=version, why=why, evidence=dict(evidence or {}))
        line = entry.model_dump_json().encode() + b"\n"
        path = self.folder / LEDGER
        with lock(self.folder / LOCK):
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

    def ledger(self) -> list[LedgerEntry]:
        """All entries, oldest first, without torn lines; empty if there is no ledger."""
        path = self.folder / LEDGER
        entries = []
        for number, line in enumerate(path.read_bytes().split(b"\n") if path.exists() else (), 1):
            if not line.endswith(b"}"):  # empty or torn
                continue
            try:
                entries.append(LedgerEntry.model_validate_json(line))
            except ValidationError as problem:
                if problem.errors()[0]["type"] == "json_invalid":  # torn inside a nested object
                    continue
                raise RegistryError(
                    f"{path}, line {number}: {_first_problem(problem)}. Move the ledger away; a "
                    "new one will be started."
                ) from None
        return entries

    def _point_to(self, version: int, reason: str) -> Pointer:
        self.manifest(version)  # raises if there is no such version
        mark = self.bad_mark(version)
        if mark is not None:
            raise RegistryError(
                f"{self.path(version)} is marked as bad: {mark.reason}. Point to another version, "
                "or publish a new one."
            )
        pointer = Pointer(version=version, changed=_now(), reason=reason)
        _write(self.folder / POINTER, pointer)
        return pointer

    def _good_ancestor(self, version: int) -> int:
        ancestor = self.manifest(version).parent
        while ancestor is not None and self.bad_mark(ancestor) is not None:
            ancestor = self.manifest(ancestor).parent
        if ancestor is None:
            raise RegistryError(
                f"Version {version} of {self.folder} has no good ancestor to roll back to. Publish "
                "another version and point to it."
            )
        return ancestor

    def _mark_path(self, version: int) -> Path:
        return self.folder / MARKS / f"{version:04d}.json"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, content: _File) -> None:
    write_text(path, content.model_dump_json(indent=2) + "\n")


def _read(path: Path, kind: type[_AnyFile]) -> _AnyFile:
    try:
        return kind.model_validate_json(read_text(path))
    except ValidationError as problem:
        raise RegistryError(
            f"{path}: {_first_problem(problem)}. Restore the file, or start a new registry."
        ) from None


def _first_problem(problem: ValidationError) -> str:
    first = problem.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "content"
    field = field if field.isprintable() else ascii(field)
    # `reprlib` keeps a huge value out of the message.
    return f"{field} is {reprlib.repr(first['input'])}: {first['msg']}"
