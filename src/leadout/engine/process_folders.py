"""Folders of running processes among the temporary files, removed once their processes have ended.

Engines and servers have one each, inside a folder that no other user can enter:

    TMPDIR/leadout-UID/NAME

`claim` creates a folder and locks it until the process ends, however it ends. Each claim also
removes what nobody has locked: the folders of killed processes, and the shared memory that these
processes had noted. Locks are seen by processes in other containers too, process ids are not.

The folder itself is locked, not a file in it: cleaners of temporary files delete old files, and
systemd-tmpfiles spares a locked folder with all that is in it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from threading import RLock

PRIVATE = f"leadout-{os.getuid()}"  # folder among temporary files
SHARED_MEMORY = Path("/dev/shm")
SOCKETS = "VLLM_RPC_BASE_PATH"  # vLLM's: where the sockets between its processes are
MAX_FILE_SECONDS = 3600.0  # until a file beside the folders is removed
_NOTED = "shared-memory"  # a file with the names, one per line
_SEGMENT = re.compile(r"/dev/shm/((?:psm_|sem\.mp-)\w+)")  # Python's own names
_MAX_SOCKET_PATH = 107  # bytes, of Linux
_SOCKET_NAME = 37  # a slash and a UUID

_claimed: dict[Path, int] = {}  # folders of this process, with the descriptors of their locks
_guard = RLock()  # several threads of an engine write files


def private_folder() -> Path:
    return Path(tempfile.gettempdir()) / PRIVATE


def is_ours(folder: Path) -> bool:
    """Whether only this user can have written into a folder."""
    found = folder.stat(follow_symlinks=False)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def claim(folder: Path) -> int:
    """Hold a folder of `private_folder` until this process ends or releases it.

    Returns the descriptor of the lock. Several processes can hold the same folder.
    """
    with _guard:
        if folder in _claimed:
            if _is_current(folder, _claimed[folder]):
                return _claimed[folder]
            os.close(_claimed.pop(folder))  # somebody has removed the folder
        _prepare(folder.parent)
        while True:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            try:
                descriptor = hold(folder)
            except FileNotFoundError:  # another process has just removed the folder
                continue
            if _is_current(folder, descriptor):
                _claimed[folder] = descriptor
                return descriptor
            os.close(descriptor)


def release(folder: Path) -> None:
    """Remove a claimed folder, unless another process holds it too."""
    with _guard:
        descriptor = _claimed.pop(folder, None)
        if descriptor is None:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder, descriptor)
        except OSError:
            pass
        finally:
            os.close(descriptor)


def folder_for_sockets() -> dict[str, str]:
    """The variable that makes vLLM keep the sockets of its processes in a folder of this one.

    Without it they are among the temporary files, and stay there if the server is killed. The lock
    survives `exec`, by which `leadout serve` becomes the server.
    """
    folder = private_folder() / f"server-{secrets.token_hex(4)}"
    if SOCKETS in os.environ or len(os.fsencode(folder)) > _MAX_SOCKET_PATH - _SOCKET_NAME:
        return {}
    try:
        os.set_inheritable(claim(folder), True)
    except OSError:  # a temporary folder that cannot be used; vLLM will say so
        return {}
    return {SOCKETS: str(folder)}


def note_shared_memory(folder: Path) -> None:
    """Write down the shared memory that this process uses, for whoever starts after its end."""
    names = sorted(set(_SEGMENT.findall(Path("/proc/self/maps").read_text())))
    if names:
        claim(folder)
        (folder / _NOTED).write_text("\n".join(names))


def hold(folder: Path) -> int:
    """Lock an existing folder until this process ends or closes the returned descriptor."""
    descriptor = _open(folder)
    with suppress(OSError):  # a file system without locks, where no lock is ever granted
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def is_held(folder: Path) -> bool:
    """Whether a process has locked this folder; False if it does not exist."""
    try:
        descriptor = _open(folder)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_current(folder: Path, descriptor: int) -> bool:
    """Whether a folder is still the one that was opened: it may have been removed and made anew."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _remove(folder: Path, descriptor: int) -> None:
    """Remove a folder whose lock no other process holds.

    Under another name, because a process that claims it meanwhile puts its own files there.
    """
    if _is_current(folder, descriptor):
        removed = folder.rename(folder.with_name(f"{folder.name}.{secrets.token_hex(4)}"))
        shutil.rmtree(removed, ignore_errors=True)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _prepare(place: Path) -> None:
    """Create the private folder, or check that it is ours, and remove what was left in it."""
    place.mkdir(mode=0o700, exist_ok=True)
    if not is_ours(place):
        raise OSError(f"{place} belongs to another user; set TMPDIR to a folder of your own")
    place.chmod(0o700)
    for folder in place.iterdir():
        with suppress(OSError):  # another process may have removed it
            if folder not in _claimed:
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    try:
        descriptor = _open(folder)
    except NotADirectoryError:
        if time.time() - folder.stat(follow_symlinks=False).st_mtime > MAX_FILE_SECONDS:
            folder.unlink()
        return
    try:
        # Kept until the folder is gone: a process that claims it now waits, and creates it again.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (folder / _NOTED).exists():
            for name in (folder / _NOTED).read_text().splitlines():
                _remove_shared_memory(name)
        _remove(folder, descriptor)
    finally:
        os.close(descriptor)


def _remove_shared_memory(name: str) -> None:
    path = SHARED_MEMORY / name
    with suppress(OSError):  # its process has removed it in order
        if _SEGMENT.fullmatch(f"/dev/shm/{name}") and path.stat().st_uid == os.getuid():
            path.unlink()
