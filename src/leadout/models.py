"""A model by its name: a local folder as it is, or a hub name in the hub's cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from leadout.errors import LeadoutError

# Configuration and weights, and what tokenizers and chat templates are written in.
_WHOLE_MODEL = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


class ModelNotFoundError(LeadoutError):
    """Neither a folder nor a hub name that can be had here."""


def local_folder(name: str, revision: str | None = None, *, config_only: bool = False) -> Path:
    """The folder of a model, fetched from the hub if need be (and if there is a network).

    `config_only` leaves the weights where they are: enough to see what a target is.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json"] if config_only else [*_WHOLE_MODEL]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as problem:
        reason = str(problem).strip().splitlines()[0]
        raise ModelNotFoundError(
            f"{name}: found neither a folder nor a hub model of this name, wanted one ({reason}). "
            "Check the spelling, or download it first."
        ) from problem


# When two names mean the same model: hub names, local folders, folders of the hub's cache.

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


# A short name for the exact contents of a model folder, made without reading all of it.


def fingerprint(folder: Path) -> str:
    """Of a model's configuration and weights: file sizes and headers, not the whole of them."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        for offset in _probes(path.stat().st_size):
            with path.open("rb") as file:
                file.seek(offset)
                digest.update(file.read(_PROBE_BYTES))
    return digest.hexdigest()


_PROBE_BYTES = 1 << 20


def _probes(size: int) -> Sequence[int]:
    """Starts of the pieces that are read: the header, and seven spread over the weights."""
    return [size * place // 8 for place in range(8)]
