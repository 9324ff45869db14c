"""Files that survive a crash: atomic replacement, locks, bounded reads, early write checks.

Every file that Leadout reads may be damaged, or be something else under its name. The readers here
refuse what is no regular file, since opening a pipe or a device can block for ever, and what is
larger than any such file can be. They raise nothing but `FileError`.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from filelock import BaseFileLock, FileLock
from filelock import Timeout as Timeout  # noqa: PLC0414 - raised by `lock`
from pydantic import BaseModel, ValidationError

from leadout.errors import LeadoutError, shortened
from leadout.leftovers import remove_abandoned, temporary_path

MAX_MIB = 64  # of a file that is read at once, or of a line
MAX_NESTING = 64  # of JSON
_MAX_DIGITS = 100  # of an integer in JSON: tokenizers have one of 31, and a float takes 308
_Model = TypeVar("_Model", bound=BaseModel)


class FileError(LeadoutError):
    """A file or folder that cannot be read or written as needed."""


class MissingFileError(FileError):
    """There is no such file."""


class InvalidFileError(FileError):
    """A file with another content than expected."""


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[Path]:
    """A temporary path in the same folder that takes the final name once it is on the disk.

    Readers see the old file or the new one, never a part of it, also after a power failure. The
    mode of the new file follows the umask, whatever library wrote it, unless `mode` is given.
    """
    remove_abandoned(path.parent)
    temporary = temporary_path(path)
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


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading; `FileError` for anything else, or if reading fails."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
            raise FileError(f"{path} is {kind}, expected a file.")
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise MissingFileError(f"{path} does not exist.") from None
    except OSError as problem:
        raise FileError(f"{path} cannot be read: {problem.strerror or problem}.") from None


def read_bytes(path: Path, max_mib: int = MAX_MIB) -> bytes:
    """The content of a regular file of bounded size, or a `FileError` that says what it is."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_mib * 2**20:
            raise FileError(f"{path} has {size:,} bytes, expected at most {max_mib} MiB.")
        return file.read(size)


def read_text(path: Path, max_mib: int = MAX_MIB) -> str:
    """As `read_bytes`, of a file in UTF-8."""
    # Like text files that Python opens: lines may end as on any system.
    text = decoded(read_bytes(path, max_mib), str(path))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def decoded(content: bytes, where: str) -> str:
    """The text of a file that must be UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        place = f"at byte {problem.start}"
        raise InvalidFileError(
            f"{where} is not valid UTF-8 {place}; expected a text file."
        ) from None


def read_lines(path: Path, max_mib: int = MAX_MIB) -> Iterator[bytes]:
    """The lines of a regular file of any size, with their ends; the last one may have none."""
    with opened(path) as file:
        while line := file.readline(max_mib * 2**20):
            if len(line) == max_mib * 2**20:
                raise InvalidFileError(
                    f"{path} has a line of more than {max_mib} MiB, expected one record per line."
                )
            yield line


def read_model(path: Path, kind: type[_Model], max_mib: int = MAX_MIB) -> _Model:
    """The content of a JSON file that Leadout wrote."""
    try:
        return kind.model_validate_json(read_bytes(path, max_mib))
    except ValidationError as problem:
        raise InvalidFileError(f"{path}: {first_problem(problem)}.") from None


def first_problem(
    problem: ValidationError, whole: str = "content", *, with_value: bool = False
) -> str:
    """Field and reason of the first thing that pydantic found wrong; `whole` names no field.

    With its value only where that cannot be what a user wrote.
    """
    first = problem.errors(include_url=False, include_input=with_value)[0]
    field = shortened(".".join(str(part) for part in first["loc"]) or whole)
    if with_value:  # `reprlib` keeps a huge value out of the message
        field += f" is {shortened(reprlib.repr(first['input']))}"
    return f"{field}: {shortened(first['msg'].removeprefix('Value error, '), 500)}"


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of another program; NaN and infinity are allowed."""
    try:
        found = json.loads(read_text(path), parse_int=_bounded_int)
    except (ValueError, RecursionError) as problem:
        raise InvalidFileError(f"{path} is not valid JSON: {shortened(str(problem))}.") from None
    if not isinstance(found, dict):
        raise InvalidFileError(f"{path} contains a {type(found).__name__}, expected an object.")
    if is_deeper(found, MAX_NESTING):
        raise InvalidFileError(f"{path} is nested deeper than {MAX_NESTING} levels.")
    return found


def is_deeper(value: object, levels: int) -> bool:
    """Whether objects and lists are nested deeper than that: printing those could fail."""
    if not isinstance(value, dict | list):
        return False
    children = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_deeper(child, levels - 1) for child in children)


def _bounded_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


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
