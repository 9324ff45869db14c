"""The target's embedding, output head and final norm, read from its files without the model.

A drafter uses embedding and head but owns neither: they stay frozen and are never written into its
checkpoint. The final norm is needed for states that were taken before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leadout.checkpoints.store import open_tensors, read_header
from leadout.dflash.config import LogitScaling
from leadout.dflash.target import UnsupportedTargetError, find_decoder
from leadout.files import FileError
from leadout.pairing.target import read_any_config, read_logit_scaling

# Bytes of logits that are held at once, in float32. On CPUs they stay near the cache; on
# accelerators matrix products of this size are efficient.
LOGIT_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
# Possible prefixes of a decoder's tensor names.
_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.", "language_model.")

# Possible names of a decoder's final norm, in transformers and in files.
_NORMS = ("norm", "final_layernorm", "final_norm", "ln_f", "final_layer_norm")


class TargetWeights(NamedTuple):
    embedding: Tensor  # [vocab, H]
    head: Tensor  # [vocab, H]
    # Of the target's own logits. A drafter that uses the head has its own scaling, usually none.
    scaling: LogitScaling = LogitScaling()


def slots_per_chunk(head: Tensor) -> int:
    """For how many states at once to compute logits over a head [vocab, H]."""
    limit = LOGIT_BYTES.get(head.device.type, LOGIT_BYTES["cuda"])
    return max(1, limit // (4 * len(head)))


class TargetFiles:
    """The tensors of a target, by their names inside its decoder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._file_of |= dict.fromkeys((each.name for each in read_header(path)), path)

    def find(self, name: str) -> Tensor | None:
        """The tensor `name` of the decoder, such as `layers.3.mlp.up_proj.weight`."""
        for prefix in _PREFIXES:
            path = self._file_of.get(prefix + name)
            if path is not None:
                with open_tensors(path) as opened:
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
    config: Mapping[str, Any] = read_any_config(target.folder)
    scaling = read_logit_scaling(config, target.folder / "config.json")
    text = config.get("text_config")
    nested = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    tied = config.get("tie_word_embeddings", nested)
    embedding = _copied(target.require(EMBEDDING), dtype, device)
    if target.find(HEAD) is None and tied is not False:
        return TargetWeights(embedding, embedding, scaling)
    head = _copied(target.require(HEAD), dtype, device)
    if head.dim() != 2 or head.shape[-1:] != embedding.shape[-1:]:
        raise FileError(
            f"{target.folder}: {HEAD} has shape {list(head.shape)} and {EMBEDDING} "
            f"{list(embedding.shape)}; expected two matrices with the same number of columns. "
            "Download the target again."
        )
    return TargetWeights(embedding, head, scaling)


def load_final_norm(target: TargetFiles, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The norm between the last layer and the head: the target's own class with its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # transformers does not annotate from_config
    with torch.device("meta"):  # the whole model, without memory for it
        decoder = find_decoder(auto.from_config(AutoConfig.from_pretrained(target.folder)))
    for name in _NORMS:
        norm = getattr(decoder, name, None)
        if isinstance(norm, nn.Module):
            weights = {
                part: _copied(target.require(f"{name}.{part}"), dtype, device)
                for part, _ in norm.named_parameters()
            }
            norm.load_state_dict(weights, assign=True)
            return norm.requires_grad_(False)
    raise UnsupportedTargetError(
        f"{target.folder}: {type(decoder).__name__} has no final norm under a known name "
        f"({', '.join(_NORMS)}), so hidden states of a server cannot be used. Train with --states "
        "compute."
    )


def _copied(rows: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    # NaN first: rows that are not overwritten show up in the very first loss.
    weights = torch.full(rows.shape, torch.nan, dtype=dtype, device=device)
    weights.copy_(rows)
    return weights
