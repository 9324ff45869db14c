"""Models by name: local folders, hub names and folders of the hub's cache."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from leadout.errors import LeadoutError

# Configuration and weights, tokenizers and chat templates, a drafter's trained mask embedding.
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "mask_embedding.pt")
_CACHED = "models--"


class ModelNotFoundError(LeadoutError):
    """A name that is neither a local folder nor a model on the hub or in its cache."""


def local_folder(
    name: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    config_only: bool = False,
) -> Path:
    """The folder of a model, downloaded from the hub if necessary.

    `revision` and `download_dir` are vLLM's; with the same values vLLM finds the files that were
    downloaded here, and the other way round. `config_only` does not download the weights.
    """
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists():
        raise ModelNotFoundError(f"{name} is a file; expected the folder of a model or a hub name.")
    if _is_path(name):
        raise ModelNotFoundError(
            f"{name} does not exist; expected the folder of a model, or a hub name such as "
            "Qwen/Qwen3-8B. Check the path."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = ["*.json"] if config_only else [*_MODEL_FILES]
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=patterns,
                # Some models have the same weights again in another format in a subfolder.
                ignore_patterns=["*/*"],
            )
        )
    except RepositoryNotFoundError as problem:
        raise ModelNotFoundError(
            f"{name} is neither a local folder nor a model on the Hugging Face hub that you can "
            "access. Check the spelling; for private and gated models run `hf auth login`."
        ) from problem
    except RevisionNotFoundError as problem:
        raise ModelNotFoundError(
            f"{name} has no revision {revision} on the Hugging Face hub; expected one of its "
            "branches, tags or commits. Check the revision."
        ) from problem
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as problem:
        reason = str(problem).strip().splitlines()[0].rstrip(".")
        raise ModelNotFoundError(
            f"{name} is neither a local folder nor in the Hugging Face cache, and could not be "
            f"downloaded: {reason}. Check the name, the network and HF_HUB_OFFLINE, or run "
            f"`hf download {name}` first."
        ) from problem


def commit_of(folder: Path) -> str | None:
    """The commit of a model in the hub's cache, which names its folders so; None for others."""
    return folder.name if re.fullmatch("[0-9a-f]{40}", folder.name) else None


def is_left_to_vllm(name: str) -> bool:
    """Whether only vLLM can fetch this model: from an object store or ModelScope, or as GGUF."""
    if "://" in name or os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return not Path(name).is_dir()
    # A file, or NAME:QUANTIZATION for a file in a repository of the hub.
    return name.lower().endswith(".gguf") or ("gguf" in name.lower() and ":" in name)


def hub_name(name: str) -> str | None:
    """The OWNER/NAME behind a hub name or a folder of the hub's cache; None for another folder."""
    local = _is_path(name) or "/" not in name or Path(name).is_dir()
    return _cached_name(name) or (None if local else name)


def last_part(name: str) -> str:
    """The model's own name, without its owner or parent folders."""
    return (_parts(_cached_name(name) or name) or [""])[-1]


def same_model(one: str, other: str) -> bool:
    """Whether two names may mean the same model, whatever its owner or parent folders."""
    return last_part(one).casefold() == last_part(other).casefold()


def fingerprint(folder: Path) -> str:
    """A hash that identifies a model folder: its config, and samples of its weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for place in range(8):  # the header, and seven places in the weights
                file.seek(size * place // 8)
                digest.update(file.read(1 << 20))
    return digest.hexdigest()


def _is_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def _cached_name(path: str) -> str | None:
    """OWNER/NAME from .../models--OWNER--NAME/snapshots/COMMIT."""
    parts = _parts(path)
    if len(parts) < 3 or parts[-2] != "snapshots" or not parts[-3].startswith(_CACHED):
        return None
    return parts[-3].removeprefix(_CACHED).replace("--", "/", 1)


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]
