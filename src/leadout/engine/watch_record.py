"""What each server has found out about a version, kept in the registry.

    registry/watches/0002/HOST_8000.json

A server that restarts continues its comparison from its record, and servers of one registry vote by
their records: where two of them compare a version, one alone cannot give it up for all. Every
server rewrites its record once a minute, so that those that have gone are not waited for.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leadout.control.rollback import Tally, is_enough
from leadout.files import FileError
from leadout.registry import Registry

WATCHES = "watches"
MAX_SILENT_SECONDS = 600.0  # after which a server counts as gone
# A server that was outvoted tries the version again after this time, and compares it anew.
COOL_DOWN_SECONDS = 3600.0

Finding = Literal["watching", "passed", "failed"]
Vote = Literal["agreed", "waiting", "outvoted"]


class WatchRecord(BaseModel):
    """What one server knows of one version; later releases may add fields."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    server: str
    version: int
    found: Finding
    why: str = ""  # the version failed
    tally: Tally = Tally()  # requests since the version was swapped in, restarts included
    by_client: Tally = Tally()  # those of them that count with the limit for clients
    before: Tally | None = None  # requests of the version before
    # Requests since the server has left the version again: what others compare theirs with.
    control: Tally | None = None
    control_version: int | None = None
    checks: int = Field(default=0, ge=0)
    runs: int = Field(default=0, ge=0)  # of this server with the version, the last ones, crashed
    failed_at: float = 0.0  # Unix time
    updated: float = 0.0  # Unix time

    def is_live(self, now: float) -> bool:
        # A clock that was wrong when the record was written must not keep it alive for ever.
        return abs(now - self.updated) < MAX_SILENT_SECONDS


def write_record(registry: Registry, record: WatchRecord) -> None:
    """OSError if the registry cannot be written."""
    content = record.model_copy(update={"updated": time.time()}).model_dump_json() + "\n"
    name = f"{_folder(record.version)}/{_file_name(record.server)}.json"
    registry.storage.write(name, content.encode())


def read_records(registry: Registry, version: int) -> list[WatchRecord]:
    """Those of all servers; records that cannot be read count as missing."""
    storage, folder, records = registry.storage, _folder(version), []
    for entry in storage.entries(folder):
        with suppress(FileError, ValidationError):
            stored = storage.read(f"{folder}/{entry.name}")
            if stored is not None and entry.name.endswith(".json"):
                records.append(WatchRecord.model_validate_json(stored.content))
    return records


def vote_of(records: list[WatchRecord], server: str) -> Vote:
    """Whether the other servers of a registry agree with one that wants to give a version up.

    Agreed: another server has found the same, or there is no other one. Outvoted: all others have
    finished their comparison without a finding. Those that get too few requests to find anything
    are not waited for longer than the cool-down.
    """
    others = [record for record in records if record.server != server]
    if any(record.found == "failed" for record in others):
        return "agreed"
    now = time.time()
    live = [record for record in others if record.is_live(now)]
    own = next((record for record in records if record.server == server), None)
    if own is not None and now - own.failed_at > COOL_DOWN_SECONDS:
        live = [record for record in live if record.found != "watching" or is_enough(record.tally)]
    if not live:
        return "agreed"
    return "waiting" if any(record.found == "watching" for record in live) else "outvoted"


def control_of(records: list[WatchRecord], version: int | None) -> Tally:
    """Requests of a version on servers that have left the recorded one for it."""
    found = [r for r in records if r.control_version == version and r.is_live(time.time())]
    return sum((r.control for r in found if r.control is not None), Tally())


def is_control_coming(records: list[WatchRecord], version: int | None) -> bool:
    """Whether servers have left the recorded version for that one, but too short a time ago.

    One that gets no requests is not waited for longer than its cool-down.
    """
    now = time.time()
    left = [r for r in records if r.control_version == version and r.is_live(now)]
    is_recent = any(now - r.failed_at < COOL_DOWN_SECONDS for r in left)
    return is_recent and not is_enough(control_of(left, version))


def _folder(version: int) -> str:
    return f"{WATCHES}/{version:04d}"


def _file_name(server: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "_", server)[:100]
