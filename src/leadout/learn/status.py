"""What a registry holds and what was decided about it."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from leadout.checkpoints.ledger import Entry, read_ledger
from leadout.checkpoints.registry import Promise, Registry


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class VersionStatus(_Record):
    version: int
    parent: int | None
    made: str
    serving: bool
    mark: str | None  # why it must not be served again
    promises: dict[str, Promise]


class Status(_Record):
    serving: int
    versions: list[VersionStatus]
    ledger: list[Entry]  # oldest first


def read_status(folder: Path) -> Status:
    registry = Registry.opened(folder)
    pointer = registry.serving()
    assert pointer is not None
    return Status(
        serving=pointer.version,
        versions=[_version(registry, number, pointer.version) for number in registry.versions()],
        ledger=read_ledger(folder),
    )


def _version(registry: Registry, number: int, serving: int) -> VersionStatus:
    manifest, mark = registry.manifest(number), registry.mark_of(number)
    return VersionStatus(
        version=number,
        parent=manifest.parent,
        made=manifest.made,
        serving=number == serving,
        mark=None if mark is None else mark.reason,
        promises=manifest.promises,
    )
