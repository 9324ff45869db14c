"""The files of a checkpoint folder: config.json and safetensors, read lazily, written atomically.

Pickled weights are never opened. Links are followed only inside the folder, or into the blob store
of the Hugging Face cache next to it.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from leadout.checkpoints.config_fields import JsonObject, read_json_object
from leadout.checkpoints.errors import (
    MISSING,
    CheckpointError,
    Phrase,
    UnsupportedCheckpointError,
    missing,
)
from leadout.files import replacing, write_text

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_MAX_SHARDS = 1000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's file, type and shape, from the file's header."""

    file: Path
    name: str  # as in the file
    dtype: str  # as safetensors spells it, such as BF16
    shape: tuple[int, ...]


def read_config(folder: Path) -> JsonObject:
    """The folder's config.json."""
    if not folder.is_dir():
        raise CheckpointError(
            folder,
            "folder",
            Phrase("is a file" if folder.exists() else "does not exist"),
            f"a local folder with {CONFIG} and {WEIGHTS}",
            "Check the path; `hf download NAME` fetches a checkpoint from the Hugging Face hub.",
        )
    return read_json_object(regular_file(folder, CONFIG))


def list_tensors(folder: Path) -> list[StoredTensor]:
    """Every tensor of the checkpoint, from the headers of its safetensors files."""
    _refuse_pickled_weights(folder)
    if not (folder / INDEX).exists():
        _refuse_stray_weights(folder, {WEIGHTS})
        return read_header(regular_file(folder, WEIGHTS))
    shard_of = _read_index(folder)
    shards = sorted(set(shard_of.values()))
    _refuse_stray_weights(folder, set(shards))
    tensors = [tensor for shard in shards for tensor in read_header(regular_file(folder, shard))]
    found = {(tensor.name, tensor.file.name) for tensor in tensors}
    indexed = set(shard_of.items())
    if found != indexed:
        name, shard = min(found ^ indexed)
        in_index = (name, shard) in indexed
        raise CheckpointError(
            folder / INDEX,
            name,
            Phrase(f"is only in the index ({shard})" if in_index else f"is only in {shard}"),
            "the same tensors in the index and in the shards",
        )
    return tensors


def read_tensors(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Load tensors one by one, under the names of the mapping, as copies in memory."""
    for file in sorted({tensor.file for tensor in tensors.values()}):
        with open_tensors(file) as opened:
            for name, tensor in tensors.items():
                if tensor.file == file:
                    # Without the copy the tensor is a view of a file that may change.
                    yield name, opened.get_tensor(tensor.name).clone()


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file, as copies in memory."""
    return dict(read_tensors({tensor.name: tensor for tensor in read_header(path)}))


def write_folder(folder: Path, tensors: Mapping[str, Tensor], config: JsonObject) -> None:
    """Write a checkpoint; config.json is written last, so a folder with one is complete."""
    refuse_existing(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(folder / WEIGHTS) as temporary:
        save_file(contiguous, temporary, metadata={"format": "pt"})
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def refuse_existing(folder: Path) -> None:
    """Require a destination that does not exist or is an empty folder."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists():
        raise CheckpointError(
            folder,
            "destination",
            Phrase("is not empty" if folder.is_dir() else "is a file"),
            "a new or empty folder",
            "Choose another folder, or remove this one first.",
        )


def regular_file(folder: Path, name: str) -> Path:
    """A file of the folder; links that lead elsewhere, pipes and devices are refused."""
    path = folder / name
    try:
        mode = path.stat().st_mode
    except OSError:
        raise missing(
            folder, name, "a readable file", "Check the path, or download it again."
        ) from None
    if not stat.S_ISREG(mode):  # opening a pipe or a device could block forever
        raise CheckpointError(folder, name, Phrase("is a pipe, device or folder"), "a regular file")
    real, home = path.resolve(), folder.resolve()
    blobs = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
    if not real.is_relative_to(home) and real.parent not in blobs:
        raise CheckpointError(
            folder,
            name,
            Phrase(f"is a link to {real}"),
            "a file inside the folder",
            "Copy the file into the folder if you trust it.",
        )
    return path


def _refuse_pickled_weights(folder: Path) -> None:
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        return  # no reader opens pickles next to safetensors
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLE_SUFFIXES)
    if pickled:
        raise UnsupportedCheckpointError(
            folder,
            pickled[0],
            Phrase("has pickled weights"),
            WEIGHTS,
            "A pickle can run code when it is opened; convert it to safetensors if you trust it.",
        )


def _refuse_stray_weights(folder: Path, known: set[str]) -> None:
    stray = {path.name for path in folder.glob("*.safetensors")} - known
    if stray:
        raise CheckpointError(
            folder,
            min(stray),
            Phrase("is not part of the checkpoint"),
            f"no safetensors files other than {', '.join(sorted(known))}",
            "vLLM would load this file too; move or rename it.",
        )


def _read_index(folder: Path) -> dict[str, str]:
    path = regular_file(folder, INDEX)
    shard_of = read_json_object(path).get("weight_map", MISSING)
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(
            path, "weight_map", shard_of, "a JSON object from tensor to file names"
        )
    for tensor, shard in shard_of.items():
        # Only a bare file name stays in the folder: no separator, no drive, no "..".
        plain = isinstance(shard, str) and shard.isprintable() and Path(shard).name == shard
        if not plain or "\\" in shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                path,
                f"weight_map.{tensor}",
                shard,
                "the bare name of a .safetensors file in the same folder",
                "Do not use this checkpoint: its index points outside the folder.",
            )
    count = len(set(shard_of.values()))
    if count > _MAX_SHARDS:
        raise CheckpointError(
            path, "weight_map", Phrase(f"lists {count} files"), f"at most {_MAX_SHARDS}"
        )
    return shard_of


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a target's weights.

    Some repositories have all weights a second time in one file, which the index does not name.
    """
    files = sorted(folder.glob("*.safetensors"))
    try:
        indexed = {*_read_index(folder).values()} if (folder / INDEX).exists() else set()
    except CheckpointError:
        indexed = set()  # whoever reads the weights says what is wrong with it
    return [path for path in files if path.name in indexed] or files


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file."""
    with open_tensors(path) as opened:
        headers = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return [
            StoredTensor(path, name, header.get_dtype(), tuple(header.get_shape()))
            for name, header in headers.items()
        ]


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """An open safetensors file; opening checks that the tensors in its header fill it exactly."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe or a device could block forever
            raise OSError("it is a pipe, device or folder")
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError, MemoryError) as problem:  # the latter of absurd sizes
        raise CheckpointError(
            path, "file", Phrase(f"cannot be read ({problem})"), "a complete safetensors file"
        ) from None
