"""A registry of drafter versions: what to serve, what never to serve again, and why.

    registry/
      versions/0001/    a checkpoint plus its manifest, version.json
      serving.json      the pointer: the version that every server should run
      marks/0002.json   marks a version as bad: it must not be served again
      ledger.jsonl      every decision with its evidence, one JSON object per line
      last.json         the highest number that was ever given to a version
      watches/          what servers found out about a version (`leadout.engine.watch_record`)

It is kept in a folder or in an object store, see `leadout.storage`. A version appears complete or
not at all, and never changes afterwards. Its number is never given to another one, even if its
files are deleted. The pointer is one small file that is replaced only if it is still as it was
read, so that servers and learners on many machines can share it. All append to the same ledger.
"""

from __future__ import annotations

import math
import random
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from leadout.files import FileError, first_problem, flush_to_disk
from leadout.leftovers import scratch_folder
from leadout.models import fingerprint
from leadout.registry.records import (
    AnyFile,
    BadMark,
    Event,
    Evidence,
    ExpectedAcceptance,
    LastNumber,
    LedgerEntry,
    Manifest,
    MissingVersionError,
    Pointer,
    PointerFile,
    PointerMovedError,
    RegistryError,
    dumped,
    now,
    parsed,
)
from leadout.registry.signing import RegistryKey
from leadout.storage import (
    FolderStorage,
    Storage,
    StorageError,
    Stored,
    WrongFilesError,
    open_storage,
)
from leadout.storage.base import sha256_of

VERSIONS, MARKS = "versions", "marks"
MANIFEST, POINTER, LEDGER = "version.json", "serving.json", "ledger.jsonl"
LAST = "last.json"
MAX_TRIES = 100  # of a compare-and-set
FIRST = 1  # the version that every later one is compared with
_NUMBER = re.compile(r"[0-9]{4,9}")


class Registry:
    """The versions under one folder or URL."""

    def __init__(self, place: Path | str | Storage, key: RegistryKey | None = None) -> None:
        """With a key only versions that it has signed are used, and new ones are signed."""
        self.storage = place if isinstance(place, Storage) else open_storage(str(place))
        self._key = key

    @property
    def address(self) -> str:
        """The folder or URL, as it is given to --registry."""
        return self.storage.address

    @property
    def folder(self) -> Path:
        """The folder of a registry that is kept in one."""
        if not isinstance(self.storage, FolderStorage):
            raise RegistryError(f"{self.address} is not a folder of this machine.")
        return self.storage.folder

    def versions(self) -> list[int]:
        """All published versions, oldest first."""
        names = (entry.name.split("/") for entry in self.storage.entries(VERSIONS))
        return sorted(
            int(name[0]) for name in names if _NUMBER.fullmatch(name[0]) and name[1:] == [MANIFEST]
        )

    def path(self, version: int) -> Path:
        """The local folder of a version, which `verify` fills if the registry is elsewhere."""
        return self.storage.local_path(_folder(version))

    def manifest(self, version: int) -> Manifest:
        name = f"{_folder(version)}/{MANIFEST}"
        stored, where = self.storage.read(name), self.storage.where(name)
        if stored is None:
            raise MissingVersionError(
                f"{where} does not exist; the versions of this registry are {self.versions()} "
                "(see `leadout learn --status`)."
            )
        manifest = parsed(stored.content, Manifest, where)
        if self._key is not None:
            self._key.verify(stored.content, where)
        if manifest.version != version:
            raise RegistryError(
                f"{where} describes version {manifest.version}, expected version {version}. "
                "Restore the folder, or publish the drafter again as a new version."
            )
        return manifest

    def readable_manifests(self) -> Iterator[Manifest]:
        """Those of all versions, oldest first, without versions whose manifest cannot be read."""
        for version in self.versions():
            # Not an error of an object store, which would hide all versions at once.
            with suppress(RegistryError, FileError):
                yield self.manifest(version)

    def verify(self, version: int) -> Manifest:
        """The manifest of a version, after comparing every file with its published hash.

        The files are in `path(version)` then.
        """
        manifest = self.manifest(version)
        try:
            self.storage.fetch(_folder(version), manifest.files, MANIFEST)
        except WrongFilesError as problem:
            raise RegistryError(f"{problem}. Publish the drafter again as a new version.") from None
        return manifest

    @contextmanager
    def private_copy(self, version: int) -> Iterator[tuple[Manifest, Path]]:
        """The manifest of a version and a folder with its files, which only this process uses.

        What is verified are the bytes of the copy: whoever writes to the registry meanwhile does
        not change what is read from it.
        """
        manifest = self.verify(version)
        with scratch_folder() as copy:
            for name, digest in manifest.files.items():
                shutil.copyfile(self.path(version) / name, copy / name)
                if sha256_of(copy / name) != digest:
                    raise RegistryError(
                        f"{self.path(version) / name} changed while it was read: expected the "
                        f"published file (sha256 {digest[:12]}). Publish the drafter again as a "
                        "new version."
                    )
            yield manifest, copy

    def first(self) -> Path:
        """The folder of the first version, which must be kept unchanged.

        Compared only with its predecessor, each version could lose a little more.
        """
        if FIRST not in self.versions():
            raise RegistryError(
                f"{self.storage.where(_folder(FIRST))} does not exist. Every candidate is compared "
                f"with version {FIRST}, so that small losses do not add up over cycles: restore "
                "this folder, or accept the serving version as the new base line by creating "
                "another registry from it with --start."
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
        with self.storage.staging(VERSIONS) as staged:
            for path in sorted(drafter.iterdir()):
                if path.is_file() and path.name != MANIFEST:
                    flush_to_disk(shutil.copyfile(path, staged / path.name))
            files = {path.name: sha256_of(path) for path in sorted(staged.iterdir())}
            tries = self._tries(VERSIONS)
            while True:
                next(tries)
                manifest = Manifest(
                    version=self._take_number(),
                    parent=parent,
                    made=now(),
                    fingerprint=fingerprint(staged),
                    target_fingerprint=target_fingerprint,
                    promises=dict(expected or {}),
                    files=files,
                )
                content = dumped(manifest)
                (staged / MANIFEST).write_bytes(
                    content if self._key is None else self._key.sign(content)
                )
                flush_to_disk(staged / MANIFEST)
                # If it exists, a release that did not reserve numbers has just published it.
                if self.storage.add_folder(staged, _folder(manifest.version), MANIFEST):
                    return manifest

    def pointer(self) -> Pointer | None:
        return self._read(POINTER, Pointer)

    def require_pointer(self) -> Pointer:
        """The pointer of a registry that must have one."""
        pointer = self.pointer()
        if pointer is None:
            raise RegistryError(
                f"{self.address} is not a registry with a version to serve: {POINTER} is missing. "
                "Create one with `leadout learn TARGET --registry FOLDER --start DRAFTER`."
            )
        return pointer

    def point_to(self, version: int, reason: str, *, only_from: int | None = None) -> Pointer:
        """Set the version that servers should run; refuses one that is marked as bad.

        With `only_from` the pointer is changed only if it names that version at this moment, and
        PointerMovedError tells that it does not.
        """
        tries = self._tries(POINTER)
        while True:
            next(tries)
            stored, current = self._current_pointer(may_be_torn=only_from is None)
            found = None if current is None else current.version
            if only_from is not None and found != only_from:
                raise PointerMovedError(
                    f"version {found} is served now, expected version {only_from}; the pointer "
                    f"was not moved to version {version}"
                )
            rolled_back = () if current is None else current.rolled_back
            pointer = self._moved_pointer(version, reason, rolled_back)
            if self._replace_pointer(pointer, stored):
                return _public(pointer)

    def roll_back(self, version: int, reason: str) -> Pointer | None:
        """Mark a version as bad; if servers should run it, point to its nearest good ancestor.

        None if the pointer names another version by now: a second server came first, or a newer
        version was published.
        """
        moved: Pointer | None = None
        tries = self._tries(POINTER)
        while True:
            next(tries)
            stored, current = self._current_pointer()
            if current is None:
                break
            rolled_back = tuple(sorted({*current.rolled_back, version}))
            # The pointer changes first: even if this is interrupted, it never names a version that
            # is marked as bad.
            if current.version == version:
                why = f"rolled back from version {version}: {reason}"
                pointer = self._moved_pointer(self.good_ancestor(version), why, rolled_back)
                if self._replace_pointer(pointer, stored):
                    moved = _public(pointer)
                continue
            if version in current.rolled_back:
                break
            if self.bad_mark(version) is not None:  # by an earlier release
                break
            self._replace_pointer(current.model_copy(update={"rolled_back": rolled_back}), stored)
        if self.storage.read(_mark(version)) is None:
            self.mark_bad(version, reason)
        return moved

    def mark_bad(self, version: int, reason: str) -> None:
        """Make sure that a version is never served again."""
        self.storage.write(_mark(version), dumped(BadMark(reason=reason, marked=now())))

    def bad_mark(self, version: int) -> BadMark | None:
        mark = self._read(_mark(version), BadMark)
        if mark is not None:
            return mark
        # The process that rolled it back may have been killed before it wrote the mark.
        _, pointer = self._current_pointer(may_be_torn=True)
        if pointer is None or version not in pointer.rolled_back:
            return None
        return BadMark(reason="it was rolled back", marked=pointer.changed)

    def recover(self) -> None:
        """Finish what killed processes have begun: marks and entries of roll-backs, left files."""
        self.storage.remove_leftovers()
        _, pointer = self._current_pointer()
        for version in () if pointer is None else pointer.rolled_back:
            mark = self.bad_mark(version)
            assert mark is not None
            if self.storage.read(_mark(version)) is None:
                self.mark_bad(version, mark.reason)
            self.record("rolled_back", version, mark.reason, once=True)

    def record(
        self,
        event: Event,
        version: int | None,
        why: str,
        evidence: Evidence | None = None,
        *,
        once: bool = False,
    ) -> None:
        """Append an entry to the ledger, stored when this returns; OSError if it cannot.

        With `once` a version has one entry for the event, however many processes write it: one that
        was killed between its decision and the entry, and those that complete the ledger for it.
        """
        if once and any((each.event, each.version) == (event, version) for each in self.ledger()):
            return
        entry = LedgerEntry(
            event=event,
            version=version,
            why=why,
            # JSON has no NaN and no infinity.
            evidence={
                name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in (evidence or {}).items()
            },
            once=once,
        )
        self.storage.append(LEDGER, entry.model_dump_json().encode() + b"\n")

    def ledger(self) -> list[LedgerEntry]:
        """All entries, oldest first, without torn lines; empty if there is no ledger."""
        entries: list[LedgerEntry] = []
        unique: set[tuple[str, int | None]] = set()  # written by two processes at the same moment
        for number, line in enumerate(self.storage.lines(LEDGER), 1):
            if not line.endswith(b"}"):  # empty or torn
                continue
            try:
                entry = LedgerEntry.model_validate_json(line)
            except ValidationError as problem:
                if problem.errors()[0]["type"] == "json_invalid":  # torn inside a nested object
                    continue
                raise RegistryError(
                    f"{self.storage.where(LEDGER)}, line {number}: "
                    f"{first_problem(problem, with_value=True)}. Move the ledger away; a new one "
                    "will be started."
                ) from None
            key = entry.event, entry.version
            if not (entry.once and key in unique):
                entries.append(entry)
            unique |= {key} if entry.once else set()
        return entries

    def good_ancestor(self, version: int) -> int:
        """The nearest version that `version` was trained from and that may be served.

        If the folder of an ancestor was deleted, older versions take its place, newest first.
        """
        manifests = {each.version: each for each in self.readable_manifests()}
        line: list[int] = []
        oldest = version
        while oldest in manifests:
            parent = manifests[oldest].parent
            if parent is None or parent >= oldest:  # the latter in damaged files only
                break
            line.append(parent)
            oldest = parent
        else:
            line += sorted((each for each in manifests if each < oldest), reverse=True)
        for ancestor in line:
            if ancestor in manifests and self.bad_mark(ancestor) is None:
                return ancestor
        raise RegistryError(
            f"Version {version} of {self.address} has no good ancestor to roll back to. Publish "
            "another version and point to it."
        )

    def _current_pointer(
        self, may_be_torn: bool = False
    ) -> tuple[Stored | None, PointerFile | None]:
        stored = self.storage.read(POINTER)
        if stored is None:
            return None, None
        try:
            return stored, parsed(stored.content, PointerFile, self.storage.where(POINTER))
        except RegistryError:
            if not may_be_torn:
                raise
            return stored, None

    def _moved_pointer(
        self, version: int, reason: str, rolled_back: tuple[int, ...]
    ) -> PointerFile:
        self.manifest(version)  # raises if there is no such version
        mark = self.bad_mark(version)
        if mark is not None or version in rolled_back:
            why = "it was rolled back" if mark is None else mark.reason
            raise RegistryError(
                f"{self.storage.where(_folder(version))} is marked as bad: {why}. Point to another "
                "version, or publish a new one."
            )
        return PointerFile(version=version, changed=now(), reason=reason, rolled_back=rolled_back)

    def _replace_pointer(self, pointer: PointerFile, stored: Stored | None) -> bool:
        """Whether the pointer is now this one."""
        content = dumped(pointer)
        if self.storage.replace(POINTER, content, None if stored is None else stored.tag):
            return True
        found = self.storage.read(POINTER)  # the answer to our own write may have been lost
        return found is not None and found.content == content

    def _take_number(self) -> int:
        """A number that no version has had; a publisher that fails after this loses it."""
        tries = self._tries(LAST)
        while True:
            next(tries)
            stored = self.storage.read(LAST)
            if stored is not None:
                last = parsed(stored.content, LastNumber, self.storage.where(LAST)).version
            else:  # a new registry, or one of an earlier release
                last = max((entry.version or 0 for entry in self.ledger()), default=0)
            folders = (entry.name.partition("/")[0] for entry in self.storage.entries(VERSIONS))
            marks = (entry.name.removesuffix(".json") for entry in self.storage.entries(MARKS))
            used = [int(name) for name in (*folders, *marks) if _NUMBER.fullmatch(name)]
            number = max(last, *used, 0) + 1
            tag = None if stored is None else stored.tag
            if self.storage.replace(LAST, dumped(LastNumber(version=number)), tag):
                return number

    def _tries(self, name: str) -> Iterator[None]:
        """Pauses between the tries of a compare-and-set, longer ones later, and an end of them."""
        for number in range(MAX_TRIES):
            time.sleep(random.uniform(0.0, 0.01 * min(number, 20)))
            yield
        raise StorageError(
            f"{self.storage.where(name)} could not be replaced in {MAX_TRIES} tries, since it had "
            "changed each time; does the store support If-Match?"
        )

    def _read(self, name: str, kind: type[AnyFile]) -> AnyFile | None:
        stored = self.storage.read(name)
        return None if stored is None else parsed(stored.content, kind, self.storage.where(name))


def _folder(version: int) -> str:
    """The only place where a number becomes a path."""
    return f"{VERSIONS}/{version:04d}"


def _mark(version: int) -> str:
    return f"{MARKS}/{version:04d}.json"


def _public(pointer: PointerFile) -> Pointer:
    return Pointer.model_validate(pointer.model_dump())
