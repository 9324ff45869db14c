"""How a result file was made: command, date, versions and machine, to reproduce it."""

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
    """The command, date, versions and machine of a result."""

    model_config = ConfigDict(extra="forbid")

    command: str
    date: str
    versions: dict[str, str]
    machine: str

    @classmethod
    def of_this_run(cls) -> Self:
        script, *arguments = sys.argv
        return cls(
            command=" ".join([*_program(Path(script)), *map(_without_folders, arguments)]),
            date=datetime.now(UTC).date().isoformat(),
            versions=installed_versions(),
            machine=f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        )


def _program(script: Path) -> list[str]:
    """`leadout`, however it was started, or the Python script from the root of the repository."""
    if script.name == "leadout" or script.parts[-2:] == ("leadout", "__main__.py"):
        return ["leadout"]
    return ["python", str(Path(*script.parts[-2:]) if script.is_absolute() else script)]


def _without_folders(argument: str) -> str:
    """Absolute paths are shortened to their last part, since folders differ between machines."""
    return Path(argument).name if Path(argument).is_absolute() else argument
