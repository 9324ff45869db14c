"""Where a result file comes from: written into each of them, so that it can be made again."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from leadout.version import installed_versions


class Provenance(BaseModel):
    """The command, the day, the versions and the machine behind a result."""

    model_config = ConfigDict(extra="forbid")

    command: str
    date: str
    versions: dict[str, str]
    machine: str

    @classmethod
    def of_this_run(cls) -> Self:
        script, *words = sys.argv
        return cls(
            command=" ".join([*_program(Path(script)), *map(_without_folders, words)]),
            date=datetime.now(UTC).date().isoformat(),
            versions=installed_versions(),
            machine=f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        )


def _program(script: Path) -> list[str]:
    """Our own command by its name, however it was called, and anything else as a script."""
    is_ours = script.name == "leadout" or script.parts[-2:] == ("leadout", "__main__.py")
    return ["leadout"] if is_ours else ["python", _from_the_root(script)]


def _from_the_root(script: Path) -> str:
    """A script as it is called from the root of the project, wherever it was called from."""
    return str(Path(*script.parts[-2:])) if script.is_absolute() else str(script)


def _without_folders(word: str) -> str:
    """Folders of this machine mean nothing elsewhere: a path's last part stands for it."""
    return Path(word).name if Path(word).is_absolute() else word
