"""The folder of a ring: what servers and learners share, in memory only.

    ring.json     what the states are (`RingInfo`)
    states-ID     one ring file for each process of a server that computes states
    texts-ID      one for each engine

Only its user can enter it, and it must be in memory, because the text of users must not get onto a
disk. Several servers of the same target can share one. Files of killed processes are removed by
the next server that starts, and by a learner once it has read them.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

from leadout.files import FileError, read_model
from leadout.ring.memory import RingError, RingWriter, is_abandoned
from leadout.ring.records import RingInfo

INFO = "ring.json"
STATES: Final = "states"
TEXTS: Final = "texts"
Kind = Literal["states", "texts"]
_IN_MEMORY = ("tmpfs", "ramfs")


def prepare(folder: Path, info: RingInfo) -> None:
    """Create the folder of a ring, or join that of other servers; remove what killed ones left."""
    require_memory(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(folder)
        with _locked(folder):
            for path in ring_files(folder, hidden=True):
                if is_abandoned(path):
                    path.unlink(missing_ok=True)
            if any(True for _ in ring_files(folder)):
                _require_same(folder, info)
            elif not _is_same(folder, info):
                partial = folder / f".{INFO}"
                partial.unlink(missing_ok=True)
                descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(info.model_dump_json(indent=1))
                partial.replace(folder / INFO)
    except OSError as problem:
        raise RingError(
            f"The ring {folder} cannot be used ({problem.strerror}). Name another folder in shared "
            "memory, such as /dev/shm/leadout-ring."
        ) from None


def open_writer(folder: Path, kind: Kind, capacity: int, info: RingInfo) -> RingWriter:
    """A new ring file of this process, in a folder that is prepared."""
    with _locked(folder):  # `prepare` of another server would take a new file for an abandoned one
        return RingWriter(folder / f"{kind}-{secrets.token_hex(8)}", capacity, info.tag)


def read_info(folder: Path) -> RingInfo:
    try:
        return read_model(folder / INFO, RingInfo)
    except FileError as problem:
        raise RingError(
            f"{folder} is not a ring: {problem} Start a server with `leadout serve --learn-states "
            f"{folder}` first."
        ) from None


def ring_files(folder: Path, *, hidden: bool = False) -> Iterator[Path]:
    """The ring files in a folder, by name; `hidden`: also those that are being created."""
    for path in sorted(folder.iterdir()):
        name = path.name.removeprefix(".") if hidden else path.name
        if name.startswith((f"{STATES}-", f"{TEXTS}-")):
            yield path


def require_memory(folder: Path) -> None:
    """Refuse a folder on a disk: what is in a ring must never get onto one."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    kind = _file_system(place)
    if kind not in _IN_MEMORY:
        raise RingError(
            f"The ring {folder} is on a file system of the kind {kind}, expected tmpfs: served "
            "text must not get onto a disk. Name a folder in shared memory, such as "
            "/dev/shm/leadout-ring."
        )


def _file_system(path: Path) -> str:
    """The kind of file system, as in /proc/self/mountinfo."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            mount, _, source = line.partition(" - ")
            if mount.split()[2] == number:
                return source.split()[0]
    return "unknown"


def _require_private(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RingError(
            f"The ring {folder} can be entered by others than its user (mode "
            f"{found.st_mode & 0o777:o}, owner {found.st_uid}). Remove the folder, or `chmod 700` "
            "it."
        )


def _is_same(folder: Path, info: RingInfo) -> bool:
    try:
        found = read_model(folder / INFO, RingInfo)
    except FileError:
        return False
    return found.tag == info.tag


def _require_same(folder: Path, info: RingInfo) -> None:
    if _is_same(folder, info):
        return
    raise RingError(
        f"The ring {folder} is in use by a server with another target, other layers or another "
        "precision. Name another folder, or start this server with the same ones."
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
