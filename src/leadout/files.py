"""Files that survive a crash: atomic replacement, locks, bounded reads, early write checks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock
from filelock import Timeout as Timeout  # noqa: PLC0414 - raised by `lock`

from leadout.errors import LeadoutError


class FileError(LeadoutError):
    """A file or folder that cannot be read or written as needed."""


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[Path]:
    """A temporary path in the same folder that takes the final name once it is on the disk.

    Readers see the old file or the new one, never a part of it, also after a power failure. The
    mode of the new file follows the umask, whatever library wrote it, unless `mode` is given.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask() if mode is None else mode)
        flush_to_disk(temporary)
        temporary.replace(path)
        flush_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, mode: int | None = None) -> None:
    """Replace a text file atomically."""
    with replacing(path, mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


def flush_to_disk(path: Path) -> None:
    """fsync of a file or of a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_text(path: Path, max_mib: int = 64) -> str:
    """The text of a regular UTF-8 file of bounded size, or a `FileError` that says what it is."""
    try:
        if path.is_dir():
            raise FileError(f"{path} is a folder, expected a file.")
        size = path.stat().st_size
        if size > max_mib * 2**20:
            raise FileError(f"{path} has {size:,} bytes, expected at most {max_mib} MiB.")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileError(f"{path} does not exist.") from None
    except UnicodeDecodeError as problem:
        where = f"at byte {problem.start}"
        raise FileError(f"{path} is not valid UTF-8 {where}; expected a text file.") from None
    except OSError as problem:
        raise FileError(f"{path} cannot be read: {problem.strerror or problem}.") from None


def lock(path: Path, seconds: float = -1) -> BaseFileLock:
    """An exclusive lock between processes, to be used as a context manager.

    Waits forever by default; with `seconds` it raises `Timeout` after that time (0: at once). The
    lock file stays behind: removing it would let two processes hold "the" lock.
    """
    return FileLock(path, timeout=seconds)


def require_writable(flag: str, path: Path) -> None:
    """Refuse an output path before long work that would fail at its end."""
    folder = path if path.is_dir() else path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise FileError(f"{flag} {path}: {folder} is not a folder. Choose another path.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileError(f"{flag} {path}: no permission to write into {folder}.")


def _umask() -> int:
    # The umask can only be read by setting it; /proc has it without that side effect.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
