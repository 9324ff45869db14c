"""A slow, full or unreachable disk for the processes of a server under test.

Python imports this module at its start if this folder is in PYTHONPATH. Opening a file below
FAKE_DISK_FOLDERS (separated by ":") then depends on what the file FAKE_DISK_STATE contains:

    slow 0.5     every open takes half a second longer
    full         no file can be opened for writing, and no folder created: ENOSPC
    stale        no file of a version can be opened, as on a network disk that was lost: ESTALE

Files that are open already, and files that are opened by other code than Python's, are not touched.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

_STATE = os.environ.get("FAKE_DISK_STATE", "")
_FOLDERS = tuple(f"{folder}/" for folder in os.environ.get("FAKE_DISK_FOLDERS", "").split(":"))
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _before(event: str, args: tuple[Any, ...]) -> None:
    if event not in ("open", "os.mkdir") or not isinstance(args[0], str):
        return
    path = args[0]
    if not path.startswith(_FOLDERS):
        return
    try:
        state, _, seconds = Path(_STATE).read_text().partition(" ")
    except FileNotFoundError:
        return
    if state == "slow":
        time.sleep(float(seconds))
    # A lock file exists already, and locking it takes no space.
    is_writing = event == "os.mkdir" or bool(args[2] & _WRITING)
    if state == "full" and is_writing and not path.endswith(".lock"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    if state == "stale" and "/versions/" in path:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)


if _STATE:
    sys.addaudithook(_before)
