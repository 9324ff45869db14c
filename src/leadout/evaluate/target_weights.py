"""The target's embedding and output head, read from its files without loading the model.

A drafter uses both but owns neither: they stay frozen and are never written into its checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from leadout.files import FileError

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
# Possible prefixes of a decoder's tensor names.
_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.", "language_model.")


class TargetWeights(NamedTuple):
    embedding: Tensor  # [vocab, H]
    head: Tensor  # [vocab, H]


class TargetFiles:
    """The tensors of a target, by their names inside its decoder."""

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

    def require(self, name: str) -> Tensor:
        found = self.find(name)
        if found is None:
            raise FileError(
                f"{self.folder}: the tensor {name} is missing in the safetensors files, but the "
                "drafter needs it. Check that the target is downloaded completely."
            )
        return found


def load_target_weights(
    target: TargetFiles, dtype: torch.dtype, device: torch.device
) -> TargetWeights:
    """The embedding and the head, which are the same tensor if the target ties them."""
    config = json.loads((target.folder / "config.json").read_text())
    tied = config.get(
        "tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings")
    )
    embedding = _copied(target.require(EMBEDDING), dtype, device)
    if target.find(HEAD) is None and tied is not False:
        return TargetWeights(embedding, embedding)
    return TargetWeights(embedding, _copied(target.require(HEAD), dtype, device))


def _copied(rows: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    # NaN first: rows that are not overwritten show up in the very first loss.
    weights = torch.full(rows.shape, torch.nan, dtype=dtype, device=device)
    weights.copy_(rows)
    return weights
