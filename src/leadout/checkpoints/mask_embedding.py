"""The trained mask embedding that some drafters have next to their weights, read as data only.

The file, `mask_embedding.pt`, is PyTorch's zip of a pickle and raw numbers. Unpickling can run any
code. Here the pickle's operations are listed, not run: those of which PyTorch composes a tensor or
a dictionary of tensors and numbers are understood, and a file with any other is refused. No name in
the file is ever imported or called.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from leadout.checkpoints.errors import CheckpointError, Phrase
from leadout.checkpoints.store import regular_file
from leadout.checkpoints.tensors import require_finite

MASK_EMBEDDING = "mask_embedding.pt"
MAX_PICKLE_BYTES = 1 << 16  # a single tensor takes some hundred
MAX_VALUES = 1 << 20
_DTYPES = {
    "torch BFloat16Storage": torch.bfloat16,
    "torch HalfStorage": torch.float16,
    "torch FloatStorage": torch.float32,
}
_REBUILD_TENSOR = "torch._utils _rebuild_tensor_v2"
_REBUILD_PARAMETER = "torch._utils _rebuild_parameter"
_ORDERED_DICT = "collections OrderedDict"
_MARK = object()
_PUSHED = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"})
_CONSTANTS: dict[str, Any] = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True, slots=True)
class _Name:
    """A class or function that the file names; only ever compared with known names."""

    text: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: torch.dtype
    key: str


def read_mask_embedding(folder: Path, mask_token_id: int, hidden_size: int) -> Tensor | None:
    """The embedding [hidden_size] of the mask token; None if the checkpoint has none of its own.

    As in vLLM the file holds a tensor, or a dictionary with `embedding` and perhaps
    `mask_token_id`.
    """
    if not (folder / MASK_EMBEDDING).exists():
        return None
    path = regular_file(folder, MASK_EMBEDDING)
    found = _TorchFile(path).read()
    if isinstance(found, dict):
        stated = found.get("mask_token_id", mask_token_id)
        if stated != mask_token_id:
            raise CheckpointError(
                path, "mask_token_id", stated, f"{mask_token_id}, as in config.json"
            )
        found = found.get("embedding")
    if not isinstance(found, Tensor) or found.numel() != hidden_size:
        size = f"has {found.numel()} values" if isinstance(found, Tensor) else "has no embedding"
        raise CheckpointError(
            path, "file", Phrase(size), f"an embedding of {hidden_size} values, the hidden size"
        )
    require_finite("embedding", found, path)
    return found.reshape(-1)


class _TorchFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack: list[Any] = []
        self._memo: dict[Any, Any] = {}

    def read(self) -> Any:
        try:
            with zipfile.ZipFile(self._path) as self._zip:
                names = [name for name in self._zip.namelist() if name.endswith("/data.pkl")]
                if len(names) != 1:
                    self._refuse("is not a PyTorch file")
                self._prefix = names[0].removesuffix("data.pkl")
                return self._value(self._entry(names[0], MAX_PICKLE_BYTES))
        except (zipfile.BadZipFile, OSError, EOFError, RuntimeError) as problem:
            self._refuse(f"cannot be read ({problem})")
        # Of a pickle that ends early, or uses its stack in another order than PyTorch does.
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as problem:
            self._refuse(f"is not as PyTorch writes it ({problem})")

    def _value(self, pickled: bytes) -> Any:
        stack, memo = self._stack, self._memo
        for operation, argument, _ in pickletools.genops(pickled):
            name = operation.name
            if name in _PUSHED:
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name == "MARK":
                stack.append(_MARK)
            elif name == "EMPTY_DICT":
                stack.append({})
            elif name == "GLOBAL":
                stack.append(_Name(str(argument)))
            elif name == "STACK_GLOBAL":
                module, member = self._popped(2)
                stack.append(_Name(f"{module} {member}"))
            elif name == "TUPLE":
                stack.append(self._since_mark())
            elif name in _TUPLES:
                stack.append(self._popped(_TUPLES[name]))
            elif name == "SETITEM":
                key, value = self._popped(2)
                stack[-1][key] = value
            elif name == "SETITEMS":
                items = self._since_mark()
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            elif name == "BINPERSID":
                stack.append(self._storage(*stack.pop()))
            elif name == "REDUCE":
                callee, arguments = self._popped(2)
                stack.append(self._rebuilt(callee, arguments))
            elif name == "STOP":
                return stack.pop()
            elif name not in ("PROTO", "FRAME"):
                self._refuse(f"contains the pickle operation {name}")
        return self._refuse("ends early")

    def _popped(self, count: int) -> tuple[Any, ...]:
        taken = tuple(self._stack[-count:])
        if len(taken) != count or _MARK in taken:
            self._refuse("is not as PyTorch writes it")
        del self._stack[-count:]
        return taken

    def _since_mark(self) -> tuple[Any, ...]:
        start = len(self._stack) - 1 - self._stack[::-1].index(_MARK)
        taken = tuple(self._stack[start + 1 :])
        del self._stack[start:]
        return taken

    def _storage(self, kind: Any, storage: Any, key: Any, _device: Any, _size: Any) -> _Storage:
        text = storage.text if isinstance(storage, _Name) else str(storage)
        if kind != "storage" or text not in _DTYPES or not str(key).isdigit():
            self._refuse(f"contains values of the type {text}")
        return _Storage(_DTYPES[text], key)

    def _rebuilt(self, callee: Any, arguments: Any) -> Any:
        name = callee.text if isinstance(callee, _Name) else ""
        if name == _ORDERED_DICT and arguments == ():
            return {}
        if name == _REBUILD_PARAMETER and isinstance(arguments[0], Tensor):
            return arguments[0]
        if name == _REBUILD_TENSOR and isinstance(arguments[0], _Storage):
            return self._tensor(*arguments[:4])
        return self._refuse(f"would call {name or callee}")

    def _tensor(
        self, storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> Tensor:
        if math.prod(shape) > MAX_VALUES or min((offset, *shape, *stride)) < 0:
            self._refuse(f"contains a tensor of shape {list(shape)}")
        stored = self._entry(f"{self._prefix}data/{storage.key}", 4 * MAX_VALUES)
        values = torch.frombuffer(bytearray(stored), dtype=storage.dtype)
        # Refuses, with a RuntimeError, what lies outside of the stored values.
        return values.as_strided(shape, stride, offset).clone()

    def _entry(self, name: str, max_bytes: int) -> bytes:
        entry = self._zip.getinfo(name)
        if entry.file_size > max_bytes or entry.compress_size > max_bytes:
            self._refuse(f"has more than {max_bytes} bytes in {name}")
        if entry.compress_type != zipfile.ZIP_STORED:
            self._refuse(f"has compressed data in {name}")
        return self._zip.read(name)

    def _refuse(self, problem: str) -> NoReturn:
        raise CheckpointError(
            self._path,
            "file",
            Phrase(problem),
            "one tensor in float32, float16 or bfloat16, as torch.save writes it",
            "Leadout runs no code of such a file; write the embedding again with torch.save.",
        ) from None
