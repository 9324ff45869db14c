"""A model by its name: a local folder as it is, or a hub name in the hub's cache."""

from __future__ import annotations

from pathlib import Path

# Configuration and weights, and what tokenizers and chat templates are written in.
_WHOLE_MODEL = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


class ModelNotFoundError(FileNotFoundError):
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
