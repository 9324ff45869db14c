"""The storage interface: small files with compare-and-set, logs, and folders that never change.

It has only what a registry and captured traffic need, so that a folder and an object store can both
provide it:

- a small file is read with a tag of its content, and replaced only if it still has that tag;
- a log takes whole lines from several processes at once;
- a folder is added complete or not at all, and never changes; it is used through a local copy.

Names are relative, with "/" between their parts. Whatever the storage fails to do is an OSError
(of an object store a `StorageError`) or a `FileError`, which say nothing about the content: trying
again may help.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator

from leadout.errors import LeadoutError
from leadout.files import MAX_MIB

# In settings: a folder or a URL. A `Path` would make one slash of two.
Place = Annotated[
    str, BeforeValidator(lambda place: str(place) if isinstance(place, Path) else place)
]


class StorageError(LeadoutError, OSError):
    """A store that cannot be reached, or that does not do what it was asked; it may do so later."""


class WrongFilesError(LeadoutError):
    """The files of a folder are not those that were added."""


class Stored(NamedTuple):
    """A small file as it was read."""

    content: bytes
    tag: str  # differs if the content does


class Entry(NamedTuple):
    """A file in a listing."""

    name: str  # relative to the listed folder
    size: int
    modified: float  # Unix time


class Storage(ABC):
    """Files under one folder or URL, shared by several processes and machines."""

    def __init__(self, address: str) -> None:
        self.address = address

    def where(self, name: str) -> str:
        """The full name of a file, for messages."""
        return f"{self.address}/{name}"

    @abstractmethod
    def read(self, name: str, max_mib: int = MAX_MIB) -> Stored | None:
        """A small file; None if there is none."""

    def replace(self, name: str, content: bytes, tag: str | None) -> bool:
        """Write a small file if it still has the tag, or if there is none and the tag is None.

        False if another process was faster: nothing was written. An object store may also return
        False after a write whose answer was lost, so the caller reads the file again.
        """
        with self._locked():
            current = self.read(name)
            if (None if current is None else current.tag) != tag:
                return False
            self.write(name, content)
            return True

    @abstractmethod
    def _locked(self) -> AbstractContextManager[None]:
        """Only one process at a time is in this block."""

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Write a small file, whatever it holds now."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file; no error if there is none."""

    @abstractmethod
    def entries(self, folder: str = "") -> list[Entry]:
        """All files below a folder, by name; none if there is no such folder."""

    @abstractmethod
    def append(self, log: str, line: bytes) -> None:
        """Add a line, which ends with a newline, to a log; it is stored when this returns."""

    @abstractmethod
    def lines(self, log: str) -> list[bytes]:
        """The lines of a log without their newlines, oldest first.

        A killed writer can leave an incomplete line, which the caller has to recognize.
        """

    @abstractmethod
    def staging(self, parent: str) -> AbstractContextManager[Path]:
        """An empty local folder in which to collect what will be added below `parent`."""

    @abstractmethod
    def add_folder(self, staged: Path, folder: str, last: str) -> bool:
        """Add the files of a staging folder; False if the folder exists, with nothing written.

        The file `last` appears last: a folder without it is not complete.
        """

    @abstractmethod
    def fetch(self, folder: str, hashes: Mapping[str, str], last: str) -> Path:
        """A local folder with the files of an added one, all with the expected sha256.

        WrongFilesError if the files, besides `last`, are not exactly these.
        """

    @abstractmethod
    def local_path(self, folder: str) -> Path:
        """The local folder that `fetch` returns, whether it has been fetched or not."""

    def remove_leftovers(self) -> None:  # noqa: B027 - not every storage has any
        """Remove what killed processes have left half-written."""

    @abstractmethod
    def require_writable(self, flag: str) -> None:
        """Refuse a place that cannot be written, before long work; `flag` names it."""


def is_url(place: str | Path) -> bool:
    return "://" in str(place)


def resolved(place: str) -> str:
    """The same place for a process with another working directory."""
    return place if is_url(place) else str(Path(place).resolve())


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_names(found: set[str], expected: set[str], where: str) -> None:
    """Refuse a folder in which a file is missing or was added."""
    if found != expected:
        name = min(found ^ expected)
        change = "was added after" if name in found else "is missing since"
        raise WrongFilesError(f"{where}: {name!r} {change} publishing")


def require_hash(path: Path, digest: str, where: str) -> None:
    """Refuse a file that is not the one with this sha256."""
    if path.is_symlink() or sha256_of(path) != digest:
        change = "is a symbolic link" if path.is_symlink() else "changed since publishing"
        raise WrongFilesError(
            f"{where} {change}: expected the published file (sha256 {digest[:12]})"
        )
