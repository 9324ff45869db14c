"""When two names mean the same model: hub names, local folders, folders of the hub's cache."""

from __future__ import annotations

from pathlib import Path

_SNAPSHOTS = "snapshots"
_CACHED = "models--"


def hub_name(name: str) -> str | None:
    """The OWNER/NAME behind a hub name or a folder of the hub's cache; None for another folder."""
    cached = _cached_name(name)
    if cached is not None:
        return cached
    is_path = name.startswith(("/", ".", "~")) or name.count("/") != 1 or Path(name).is_dir()
    return None if is_path else name


def last_part(name: str) -> str:
    """The model's own name, without its owner or the folders it lies in."""
    return (_parts(_cached_name(name) or name) or [""])[-1]


def same_model(one: str, other: str) -> bool:
    """Whether two names may mean one model: owners and folders differ for copies of a model."""
    return last_part(one).casefold() == last_part(other).casefold()


def _cached_name(path: str) -> str | None:
    """OWNER/NAME from .../models--OWNER--NAME/snapshots/COMMIT."""
    parts = _parts(path)
    if len(parts) < 3 or parts[-2] != _SNAPSHOTS or not parts[-3].startswith(_CACHED):
        return None
    return parts[-3].removeprefix(_CACHED).replace("--", "/", 1)


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]
