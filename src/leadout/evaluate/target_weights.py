"""What a drafter borrows from its target, from the target's files without loading the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from leadout.errors import LeadoutError

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
# What may stand before the names of a decoder's tensors.
_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.", "language_model.")


class MissingTensorError(LeadoutError):
    """The target's files lack something that a drafter borrows."""


class Borrowed(NamedTuple):
    """Frozen, and never written into a drafter's checkpoint."""

    embedding: Tensor  # [vocab, H]
    head: Tensor  # [vocab, H]


class TargetFiles:
    """The tensors of a target by the names they have inside its decoder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as opened:
                self._file_of |= dict.fromkeys(opened.keys(), path)

    def find(self, name: str) -> Tensor | None:
        """The tensor `name` of the decoder, such as `layers.3.mlp.up_proj.weight`."""
        for prefix in _PREFIXES:
            path = self._file_of.get(prefix + name)
            if path is not None:
                with safe_open(path, framework="pt") as opened:
                    found: Tensor = opened.get_tensor(prefix + name)
                return found
        return None


def borrow(target: TargetFiles, dtype: torch.dtype, device: torch.device) -> Borrowed:
    """The embedding and the head, which are the same tensor where the target ties them.

    Both start as NaN: whatever is not replaced by the target's own rows shows in the first loss.
    """
    config = json.loads((target.folder / "config.json").read_text())
    tied = config.get(
        "tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings")
    )
    rows = _require(target, EMBEDDING)
    embedding = torch.full(rows.shape, torch.nan, dtype=dtype, device=device)
    embedding.copy_(rows)
    found = target.find(HEAD)
    if found is None and tied is not False:
        return Borrowed(embedding, embedding)
    rows = _require(target, HEAD)
    head = torch.full(rows.shape, torch.nan, dtype=dtype, device=device)
    head.copy_(rows)
    return Borrowed(embedding, head)


def _require(target: TargetFiles, name: str) -> Tensor:
    found = target.find(name)
    if found is None:
        raise MissingTensorError(
            f"{target.folder}: found no tensor {name} in its safetensors files, wanted it: the "
            "drafter borrows it; check that the target's download is complete"
        )
    return found
