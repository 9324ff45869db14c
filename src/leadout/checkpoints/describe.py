"""A summary of a checkpoint, as JSON for programs and as lines for people."""

from __future__ import annotations

from itertools import groupby

from pydantic import BaseModel, ConfigDict

from leadout.checkpoints.checkpoint import Checkpoint
from leadout.checkpoints.decoder_config import describe_rope
from leadout.dflash.config import LayerAttention
from leadout.errors import printable


class Description(BaseModel):
    """What `leadout inspect` prints."""

    model_config = ConfigDict(extra="forbid")

    path: str
    format: str
    target: str | None
    target_layers: int | None
    target_hidden_size: int
    layer_ids: list[int]  # id i: the output of target layer i, z-lab's convention
    layer_ids_in_vllm: list[int]  # plus one: the convention of vLLM and speculators
    block_size: int
    max_draft_tokens: int
    draft_tokens: int | None
    mask_token_id: int
    vocab_size: int
    draft_vocab_size: int | None
    own_embedding: bool
    own_head: bool
    layers: list[LayerAttention]
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: str
    max_positions: int
    parameters: int
    bytes_on_disk: int
    dtype: str
    notes: list[str]
    kept: list[str]

    def lines(self) -> list[tuple[str, str]]:
        """Labels and texts in display order."""
        owned = ["embedding"] * self.own_embedding + ["head"] * self.own_head
        target_layers = "" if self.target_layers is None else f" ({self.target_layers} layers)"
        vocabulary = f"{self.vocab_size}"
        if self.draft_vocab_size is not None:
            vocabulary += f", of which {self.draft_vocab_size} can be drafted"
        drafts = f"{self.block_size} (at most {self.max_draft_tokens} drafted tokens"
        if self.draft_tokens is not None:
            drafts += f"; the file states {self.draft_tokens}"
        lines = [
            ("format", self.format),
            ("target", f"{self.target or 'not named in the file'}{target_layers}"),
            ("layer ids", f"{_joined(self.layer_ids)} (output of target layer i)"),
            ("  in vLLM", f"{_joined(self.layer_ids_in_vllm)} (same in speculators)"),
            ("block size", f"{drafts})"),
            ("mask token", str(self.mask_token_id)),
            ("vocabulary", vocabulary),
            ("own tensors", ", ".join(owned) or "none: uses the target's embedding and head"),
            ("draft layers", _describe_layers(self.layers)),
            ("hidden size", f"{self.hidden_size}, MLP {self.intermediate_size}"),
            ("heads", f"{self.heads}, {self.kv_heads} key-value heads, head_dim {self.head_dim}"),
            ("rope", f"{self.rope}; up to {self.max_positions} positions"),
            ("parameters", f"{self.parameters / 1e6:,.1f} million"),
            ("size", f"{self.bytes_on_disk / 1e6:,.1f} MB in {self.dtype}"),
        ]
        if self.kept:
            lines.append(("kept fields", ", ".join(self.kept)))
        lines += [("note", note) for note in self.notes]
        return [(label, printable(text)) for label, text in lines]


def describe(checkpoint: Checkpoint) -> Description:
    config = checkpoint.config
    files = {tensor.file for tensor in checkpoint.tensors.drafter.values()}
    same_name = (
        "block_size", "max_draft_tokens", "mask_token_id", "vocab_size", "draft_vocab_size",
        "own_embedding", "own_head", "hidden_size", "intermediate_size", "head_dim",
        "max_positions",
    )  # fmt: skip
    return Description(
        **{name: getattr(config, name) for name in same_name},
        path=str(checkpoint.path),
        format=checkpoint.format,
        target=checkpoint.target_name,
        target_layers=config.target_num_layers,
        target_hidden_size=config.context_size,
        layer_ids=list(config.target_layer_ids),
        layer_ids_in_vllm=[i + 1 for i in config.target_layer_ids],
        draft_tokens=checkpoint.draft_tokens,
        layers=list(config.layers),
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        rope=describe_rope(config.rope),
        parameters=checkpoint.tensors.parameters,
        bytes_on_disk=sum(file.stat().st_size for file in files),
        dtype=str(checkpoint.tensors.dtype).removeprefix("torch."),
        notes=list(checkpoint.notes),
        kept=sorted(checkpoint.kept),
    )


def _describe_layers(layers: list[LayerAttention]) -> str:
    """Runs of equal layers: `4 sliding 2048 causal, then 1 full bidirectional`."""
    described = (
        f"{'full' if layer.window is None else f'sliding {layer.window}'} "
        f"{'causal' if layer.causal else 'bidirectional'}"
        for layer in layers
    )
    return ", then ".join(f"{len(list(run))} {text}" for text, run in groupby(described))


def _joined(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))
