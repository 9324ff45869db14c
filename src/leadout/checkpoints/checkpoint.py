"""Drafter checkpoints of either published format: inspect, load, write and convert them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from leadout.checkpoints import speculators, zlab
from leadout.checkpoints.config_fields import JsonObject, naming_the_file, read_json_object
from leadout.checkpoints.decoder_config import FILE_NAMES
from leadout.checkpoints.errors import MISSING, CheckpointError
from leadout.checkpoints.store import (
    CONFIG,
    list_tensors,
    read_config,
    refuse_existing,
    write_folder,
)
from leadout.checkpoints.tensors import (
    DRAFT_TO_TARGET,
    TARGET_TO_DRAFT,
    VERIFIER_COPIES,
    Inventory,
    by_drafter_name,
    load_tensors,
    require_finite,
    require_weights,
    take_inventory,
    target_marks,
)
from leadout.checkpoints.unsupported import refuse_unsupported
from leadout.dflash.config import DrafterConfig
from leadout.dflash.drafter import Drafter

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


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read a checkpoint's config and tensor headers and check them against each other."""
    folder = Path(path)
    config_path = folder / CONFIG
    config = read_config(folder)
    refuse_unsupported(config, config_path)
    found: Format = "speculators" if speculators.matches(config) else "zlab"
    if found == "zlab" and not zlab.matches(config):
        raise CheckpointError(
            config_path,
            "architectures",
            config.get("architectures", MISSING),
            f"{zlab.ARCHITECTURE}, or a speculators_model_type",
            "This is not a DFlash drafter. Check the path; are target and drafter swapped?",
        )
    named = by_drafter_name(list_tensors(folder), folder)
    if found == "speculators":
        reading, ignorable = speculators.read(config, named, config_path), VERIFIER_COPIES
    else:
        reading, ignorable = zlab.read(config, config_path), frozenset()
    inventory = take_inventory(named, reading.config, folder, ignorable)
    return Checkpoint(
        path=folder,
        format=found,
        config=reading.config,
        target_name=reading.target_name,
        draft_tokens=reading.draft_tokens,
        tensors=inventory,
        notes=reading.notes + inventory.notes,
        kept=reading.kept,
    )


def load_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The drafter's tensors exactly as stored, all of them finite."""
    return load_tensors(checkpoint.tensors, checkpoint.config, checkpoint.path)


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
