"""Drafter checkpoints of either published format: read, load, write, convert, describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from leadout.checkpoints import speculators, zlab
from leadout.checkpoints.config_fields import JsonObject, naming_the_file, read_json_object
from leadout.checkpoints.decoder_config import FILE_NAMES, describe_rope
from leadout.checkpoints.errors import MISSING, CheckpointError, Phrase
from leadout.checkpoints.mask_embedding import MASK_EMBEDDING, read_mask_embedding
from leadout.checkpoints.store import (
    CONFIG,
    list_tensors,
    read_config,
    read_tensors,
    refuse_existing,
    write_folder,
)
from leadout.checkpoints.tensors import (
    DRAFT_TO_TARGET,
    TARGET_TO_DRAFT,
    VERIFIER_COPIES,
    Inventory,
    by_drafter_name,
    inventory_left_to_vllm,
    require_finite,
    require_vocabulary,
    require_weights,
    take_inventory,
    target_marks,
)
from leadout.checkpoints.unsupported import TRAINED_MASK, refuse_unsupported, unsupported
from leadout.dflash.config import DrafterConfig, LayerAttention
from leadout.dflash.drafter import Drafter
from leadout.errors import printable

Format: TypeAlias = Literal["zlab", "speculators"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose config and tensor headers have been checked; no weights are loaded."""

    path: Path
    format: Format
    config: DrafterConfig
    target_name: str | None  # the target named in the file
    draft_tokens: int | None  # the K stated in the file
    tensors: Inventory
    notes: tuple[str, ...]  # how other readers differ on this file
    kept: JsonObject  # unknown fields that do not affect the computation
    left_to_vllm: tuple[str, ...] = ()  # features that vLLM computes and `Drafter` does not


def read_checkpoint(path: Path | str, *, as_served: bool = False) -> Checkpoint:
    """Read a checkpoint's config and tensor headers and check them against each other.

    `as_served` also accepts drafters that vLLM can serve but `Drafter` cannot compute, such as
    quantized ones. The tensors of these are not checked.
    """
    folder = Path(path)
    config_path = folder / CONFIG
    config = read_config(folder)
    left_to_vllm = refuse_unsupported(config, config_path, as_served=as_served)
    found: Format = "speculators" if speculators.matches(config) else "zlab"
    if found == "zlab" and not zlab.matches(config):
        raise CheckpointError(
            config_path,
            "architectures",
            config.get("architectures", MISSING),
            f"{zlab.ARCHITECTURE}, or a speculators_model_type",
            "This is not a DFlash drafter. Check the path; are target and drafter swapped?",
        )
    named, features = by_drafter_name(list_tensors(folder), folder, as_served=as_served)
    left_to_vllm |= features
    if found == "speculators":
        reading, ignorable = speculators.read(config, named, config_path), VERIFIER_COPIES
    else:
        reading, ignorable = zlab.read(config, config_path), frozenset()
    if left_to_vllm:
        inventory = inventory_left_to_vllm(named, reading.config, folder)
    else:
        inventory = take_inventory(named, reading.config, folder, ignorable)
    if (folder / MASK_EMBEDDING).exists():
        if not as_served:
            what = Phrase("is a trained mask embedding")
            raise unsupported(folder, MASK_EMBEDDING, what, TRAINED_MASK)
        read_mask_embedding(folder, reading.config.mask_token_id, reading.config.hidden_size)
        left_to_vllm.add(TRAINED_MASK)
    return Checkpoint(
        path=folder,
        format=found,
        config=reading.config,
        target_name=reading.target_name,
        draft_tokens=reading.draft_tokens,
        tensors=inventory,
        notes=reading.notes + inventory.notes,
        kept=reading.kept,
        left_to_vllm=tuple(sorted(left_to_vllm)),
    )


def load_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The drafter's tensors exactly as stored, all of them finite."""
    weights: dict[str, Tensor] = {}
    for name, tensor in read_tensors(checkpoint.tensors.drafter):
        require_finite(name, tensor, checkpoint.path)
        weights[name] = tensor
    if checkpoint.config.draft_vocab_size is not None:
        marks = checkpoint.tensors.target_to_draft
        stored = dict(read_tensors({} if marks is None else {TARGET_TO_DRAFT: marks}))
        require_vocabulary(
            weights[DRAFT_TO_TARGET],
            stored.get(TARGET_TO_DRAFT),
            checkpoint.config.vocab_size,
            checkpoint.path,
        )
    return weights


def load_drafter(path: Path | str, dtype: torch.dtype | None = None) -> Drafter:
    """Load a drafter in one precision: `dtype`, or by default that of most of its weights."""
    checkpoint = read_checkpoint(path)
    precision = dtype or checkpoint.tensors.dtype
    weights = load_weights(checkpoint)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.dtype != precision:
            weights[name] = tensor.to(precision)
            require_finite(f"{name} as {precision}", weights[name], checkpoint.path)
    with torch.device("meta"):  # allocates no memory for weights that are replaced at once
        drafter = Drafter(checkpoint.config)
    drafter.load_state_dict(weights, assign=True)
    return drafter


def write_checkpoint(
    path: Path | str,
    weights: Mapping[str, Tensor],
    config: DrafterConfig,
    to: Format,
    *,
    target_name: str | None = None,
    draft_tokens: int | None = None,
    kept: JsonObject | None = None,
) -> None:
    """Write `drafter.state_dict()` and its config; the folder must be new or empty.

    The speculators format requires the target's name; `draft_tokens` defaults to block_size - 1.
    """
    folder = Path(path)
    refuse_existing(folder)
    require_weights(weights, config, folder)
    dtype = str(weights["fc.weight"].dtype).removeprefix("torch.")
    written = _config_for(to, config, dtype, kept or {}, target_name, draft_tokens, folder)
    tensors = dict(weights)
    if config.draft_vocab_size is not None:  # speculators cannot load without it
        tensors[TARGET_TO_DRAFT] = target_marks(tensors[DRAFT_TO_TARGET], config.vocab_size)
    write_folder(folder, tensors, written)


def convert(
    source: Path | str, destination: Path | str, to: Format, target_name: str | None = None
) -> Checkpoint:
    """Rewrite a checkpoint in another format; the weights stay bit-identical.

    `target_name` is needed where the source does not name its target. If it is a local folder, the
    number of target layers is read from it.
    """
    folder = Path(destination)
    refuse_existing(folder)
    checkpoint = read_checkpoint(source)
    config = _with_target_layers(checkpoint, target_name)
    dtype = str(checkpoint.tensors.dtype).removeprefix("torch.")
    target_name = target_name or checkpoint.target_name
    # Refuse what the format cannot express before gigabytes are read.
    _config_for(to, config, dtype, checkpoint.kept, target_name, checkpoint.draft_tokens, folder)
    write_checkpoint(
        folder,
        load_weights(checkpoint),
        config,
        to,
        target_name=target_name,
        draft_tokens=checkpoint.draft_tokens,
        kept=checkpoint.kept,
    )
    return read_checkpoint(folder)


def _config_for(
    to: Format,
    config: DrafterConfig,
    dtype: str,
    kept: JsonObject,
    target_name: str | None,
    draft_tokens: int | None,
    folder: Path,
) -> JsonObject:
    if to == "zlab":
        return zlab.write(config, dtype, kept, folder)
    return speculators.write(config, dtype, kept, target_name, draft_tokens, folder)


def _with_target_layers(checkpoint: Checkpoint, target_name: str | None) -> DrafterConfig:
    """The drafter's config, completed and checked with the target's if that is a local folder."""
    config = checkpoint.config
    target = Path(target_name or "") / CONFIG
    if not target_name or not target.is_file():
        return config
    fields = read_json_object(target)
    nested = fields.get("text_config")
    count = (nested if isinstance(nested, dict) else fields).get("num_hidden_layers")
    if type(count) is not int or config.target_num_layers not in (None, count):
        raise CheckpointError(
            target,
            "num_hidden_layers",
            MISSING if count is None else count,
            str(config.target_num_layers or "a number"),
            "Pass the target that the drafter was trained for.",
        )
    with naming_the_file(checkpoint.path / CONFIG, FILE_NAMES):
        return replace(config, target_num_layers=count)


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
