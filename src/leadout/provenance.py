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
        # Folders of this machine mean nothing elsewhere: a path's last part stands for it.
        words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]
        return cls(
            command=" ".join(["python", *words]),
            date=datetime.now(UTC).date().isoformat(),
            versions=installed_versions(),
            machine=f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        )
