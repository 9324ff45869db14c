"""The folder in which a server hands out hidden states: its files, their format and its limit.

Each request of a server that was started with `leadout serve --states` leaves one safetensors file:

    states  [tokens, layers, H]  in the target's precision, or in FP8
    scales  [tokens, layers]     with FP8 only: factor of the states of a token and layer
    layers  [layers]             layer ids, ascending; the last one is the target's last layer
    tokens  [tokens]             the token ids

Files appear under their name when they are complete. Whoever reads one deletes it; until then it
counts against the limit of the folder. Instead of a file that could not be written there is a
NAME.error with the reason. Importing this needs no vLLM.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from leadout.engine import process_folders
from leadout.errors import LeadoutError, shortened, shown
from leadout.fp8 import FP8, from_fp8

SUFFIX, ERROR, PARTIAL = ".safetensors", ".error", ".partial"
SERVER_ID = "server-id"  # a file with the name that the server gives itself
ROUTE = "/leadout/states"
API_KEY = "VLLM_API_KEY"  # vLLM's: the key that its routes require, and the one that clients send
_NAME = re.compile(r"[0-9a-f]{32}")
_PREFIX = "leadout-states"
SCAN_SECONDS = 0.02


class StatesError(LeadoutError):
    """Hidden states that could not be served, fetched or used."""


class StatesInfo(BaseModel):
    """The reply of `GET /leadout/states`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    layer_ids: tuple[int, ...]  # ascending; the last one is the target's last layer
    target_fingerprint: str
    fp8: bool
    folder: Path
    server_id: str  # also in a file of the folder: a reader that finds it there is on this machine
    max_model_len: int  # tokens of a text, and one more
    max_bytes: int
    waiting_files: int
    waiting_bytes: int


class States(NamedTuple):
    """What a server computed for one text."""

    tokens: Tensor  # [tokens]
    layer_ids: list[int]
    states: Tensor  # [tokens, layers, H]


def new_name() -> str:
    """Cannot be guessed: a request's own id may be chosen by its client, and contain a path."""
    return uuid4().hex


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def path_of(folder: Path, name: str) -> Path:
    """The file of that name; refuses anything that is not a name, such as a path."""
    if not is_name(name):
        raise StatesError(f"{name[:80]!r} is not the name of states; expected 32 hex digits.")
    return folder / f"{name}{SUFFIX}"


def error_of(path: Path) -> str | None:
    """Why the file could not be written, if that is known."""
    try:
        return path.with_suffix(ERROR).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def remove(path: Path) -> None:
    for each in (path, path.with_suffix(ERROR), path.with_suffix(PARTIAL)):
        each.unlink(missing_ok=True)


def write_states(path: Path, tensors: dict[str, Tensor], max_bytes: int) -> None:
    """Write `tensors` so that the file appears complete, or the reason why there is none."""
    size = sum(each.nbytes for each in tensors.values())
    partial = path.with_suffix(PARTIAL)
    try:
        if size > max_bytes:
            raise OSError(
                f"the states of {len(tensors['tokens'])} tokens have {size:,} bytes, more than "
                f"the {max_bytes:,} of --states-backlog: raise it, or send shorter texts"
            )
        save_file(tensors, partial)
        partial.replace(path)
    except (OSError, SafetensorError) as problem:
        partial.unlink(missing_ok=True)  # makes room for the reason
        path.with_suffix(ERROR).write_text(str(problem), encoding="utf-8")


def parse_states(content: bytes) -> States:
    """The content of a file, with FP8 states as float32."""
    try:
        tensors = load(content)
        states, tokens, layers = (tensors[name] for name in ("states", "tokens", "layers"))
        scales = tensors["scales"].float() if states.dtype == FP8 else None
    except (SafetensorError, KeyError, ValueError) as problem:
        raise StatesError(f"the file of states is damaged ({shortened(str(problem))})") from None
    is_sound = (
        tokens.dim() == layers.dim() == 1
        and states.shape[:-1] == (len(tokens), len(layers))
        and states.is_floating_point()
        and not any(each.is_floating_point() or each.is_complex() for each in (tokens, layers))
        and (scales is None or scales.shape == states.shape[:-1])
    )
    if not is_sound:
        found = {name: (each.dtype, list(each.shape)) for name, each in tensors.items()}
        raise StatesError(f"the file of states is damaged (it holds {shown(found)})")
    if scales is not None:
        states = from_fp8(states, scales)
    return States(tokens, layers.tolist(), states)


def make_folder(parent: Path | None = None) -> Path:
    """A new folder that only this user can read, in shared memory unless a parent is given.

    Removes those that ended processes of this user left in the same place. The process id in the
    name stays that of the server: `leadout serve` becomes the server. Whoever uses the folder must
    `hold` it.
    """
    memory = process_folders.SHARED_MEMORY
    place = parent or (memory if memory.is_dir() else Path(tempfile.gettempdir()))
    place.mkdir(parents=True, exist_ok=True)
    for old in place.glob(f"{_PREFIX}-*-*"):
        with suppress(OSError):  # another server that starts removes it as well
            if old.stat().st_uid == os.getuid() and not _is_in_use(old):
                shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-", dir=place))
    (folder / SERVER_ID).write_text(new_name(), encoding="utf-8")
    return folder


def hold(folder: Path) -> int:
    """Mark a folder as in use until this process ends or closes the returned descriptor.

    Servers in containers that share /dev/shm do not see each other's process ids, but they do see
    each other's locks. The descriptor survives `exec`, by which `leadout serve` becomes the server.
    """
    try:
        descriptor = process_folders.hold(folder)
    except OSError as problem:
        raise StatesError(
            f"The folder of hidden states {folder} cannot be used ({problem.strerror}). Start the "
            "server again with `leadout serve TARGET --states`, which makes a new one."
        ) from None
    os.set_inheritable(descriptor, True)
    return descriptor


def _is_in_use(folder: Path) -> bool:
    """Whether its process runs here, or one in another container holds it."""
    pid = folder.name.split("-")[2]
    is_running = not pid.isdigit() or Path(f"/proc/{pid}").exists()
    return is_running or process_folders.is_held(folder)


def server_id(folder: Path) -> str | None:
    """The id of the server that writes into a folder; None if this machine has no such folder."""
    try:
        return (folder / SERVER_ID).read_text(encoding="utf-8")
    except (OSError, ValueError):  # ValueError: not UTF-8, or a NUL in the path
        return None


class Usage(NamedTuple):
    files: int
    bytes: int


def usage(folder: Path) -> Usage:
    """The files that wait to be read."""
    sizes = []
    for each in os.scandir(folder):
        if each.name.endswith((SUFFIX, PARTIAL)):
            try:
                sizes.append(each.stat().st_size)
            except FileNotFoundError:  # read and deleted meanwhile
                continue
    return Usage(len(sizes), sum(sizes))


class Backlog:
    """Decides which requests may run, so that their files never exceed the folder's limit.

    A request that would exceed it waits until others are read. Files that nobody has read for
    `max_seconds`, of readers that are gone, are then removed.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        max_seconds: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._sleep = sleep
        self._reserved: dict[str, int] = {}  # bytes of requests whose files are not written yet
        self._full_until = 0.0

    def admit(self, request: str, size: int) -> bool:
        """Whether this request may run now; if not, it is to be asked for again."""
        if request in self._reserved:
            return True
        if size > self._max_bytes:  # will never fit: `write_states` says so
            return True
        if time.monotonic() < self._full_until:
            return False
        if self._used() + size > self._max_bytes:
            self._remove_unread()
            if self._used() + size > self._max_bytes:
                # The engine asks again in a loop without a pause.
                self._sleep(SCAN_SECONDS)
                self._full_until = time.monotonic() + SCAN_SECONDS
                return False
        self._reserved[request] = size
        return True

    def release(self, request: str) -> None:
        """The file of this request is written, or will never be."""
        self._reserved.pop(request, None)

    def _used(self) -> int:
        return usage(self._folder).bytes + sum(self._reserved.values())

    def _remove_unread(self) -> None:
        oldest = time.time() - self._max_seconds
        for each in self._folder.iterdir():
            try:
                if each.name != SERVER_ID and each.stat().st_mtime < oldest:
                    each.unlink()
            except FileNotFoundError:
                continue
