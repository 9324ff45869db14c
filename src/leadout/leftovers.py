"""Temporary names of files that are being written, and what killed processes leave under them."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from itertools import count
from pathlib import Path
from zlib import crc32

# Nothing is written for as long as this: an older temporary file is that of a killed process.
MAX_WRITE_SECONDS = 86400.0
_TEMPORARY = re.compile(r"\..*\.([0-9a-f]{8})-([0-9]+)-[0-9]+\.partial")
_numbers = count()


def temporary_path(path: Path) -> Path:
    """A name beside a file or folder to write it under; `remove_abandoned` recognizes it."""
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}-{next(_numbers)}.partial")


def remove_abandoned(folder: Path) -> None:
    """Remove what killed processes have left in a folder under temporary names."""
    paths: list[Path] = []
    with suppress(OSError):  # the file that is written next reports it
        paths += folder.iterdir()
    for path in paths:
        found = _TEMPORARY.fullmatch(path.name)
        with suppress(OSError):  # it may be that of another user
            if found is not None and _is_abandoned(path, found[1], int(found[2])):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """An empty folder that only its owner can read, beside `path`; removed at the end."""
    remove_abandoned(path.parent)
    folder = temporary_path(path)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # unless it has another name by now


def scratch_folder() -> AbstractContextManager[Path]:
    """A `temporary_folder` on the local disk, under a name that no other user can foresee."""
    return temporary_folder(Path(tempfile.gettempdir()) / f"leadout-{secrets.token_hex(4)}")


def _is_abandoned(path: Path, machine: str, process: int) -> bool:
    if time.time() - path.stat().st_mtime > MAX_WRITE_SECONDS:
        return True
    if machine != _machine():  # which may still be writing it
        return False
    try:
        os.kill(process, 0)
        return False
    except PermissionError:  # a process of another user
        return False
    except ProcessLookupError:
        return True


@lru_cache
def _machine() -> str:
    """Stands for the processes that this one can see: those of one boot and one PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        boot, namespace = socket.gethostname(), ""
    return f"{crc32(f'{boot} {namespace}'.encode()):08x}"
