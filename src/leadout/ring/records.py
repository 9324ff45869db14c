"""What is in a ring: the description of its states, records of states, and records of texts.

A `StatesRecord` has the states that one step of a server computed for one request, a `TextRecord`
the tokens of a finished request. Both carry the request's key: a salted hash of its id, since
clients may choose ids. Records are packed into plain bytes; whatever is not exactly such a record
is refused with a `RingError`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from leadout.fp8 import FP8, from_fp8, to_fp8
from leadout.ring.memory import TAG_BYTES, RingError

KEY_BYTES = 16
RingType = Literal["bfloat16", "float32", "float8"]
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8": FP8}
_STATES, _TEXT = 0x53, 0x54
_STATES_HEAD = struct.Struct("<B3x16sII")  # kind, key, first position, rows
_TEXT_HEAD = struct.Struct("<B3x16sIIdq")  # kind, key, prompt, response, temperature, version
_NO_VERSION = -1


class RingInfo(BaseModel):
    """What the states of a ring are, as `ring.json` in its folder describes them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    target: str
    target_fingerprint: str
    # i is the output of layer i; in the order in which the states of a row follow each other.
    layer_ids: tuple[int, ...] = Field(min_length=1, max_length=1024)
    hidden_size: int = Field(ge=1, le=1 << 20)
    dtype: RingType
    window: int | None = None  # positions that the drafter attends to; None: all of them
    server_id: str  # of the server that created the folder

    @property
    def width(self) -> int:
        """Values of a row."""
        return len(self.layer_ids) * self.hidden_size

    @property
    def row_bytes(self) -> int:
        """Of a row in a record, with its token and scales."""
        scales = 4 * len(self.layer_ids) if self.dtype == "float8" else 0
        return 4 + scales + self.width * _DTYPES[self.dtype].itemsize

    @property
    def tag(self) -> bytes:
        """Differs between rings whose records must not be mixed."""
        content = self.model_dump_json(exclude={"server_id", "target", "window"})
        return blake2b(content.encode(), digest_size=TAG_BYTES).digest()


def request_key(request_id: str, salt: str) -> bytes:
    """The name of a request in a ring, from which its id cannot be derived."""
    return blake2b(request_id.encode(), key=salt.encode()[:64], digest_size=KEY_BYTES).digest()


@dataclass(frozen=True)
class StatesRecord:
    """States of consecutive positions of one request, as one step computed them."""

    key: bytes
    first: int  # position of the first row
    # [rows] The input tokens. A row depends on these and on all tokens before `first`, so a reader
    # can tell the rows of drafts that were rejected.
    tokens: Tensor
    states: Tensor  # [rows, layers * H]

    def packed(self, info: RingInfo) -> list[bytes | memoryview]:
        """The parts of the record, for `RingWriter.write`."""
        rows = len(self.tokens)
        head = _STATES_HEAD.pack(_STATES, self.key, self.first, rows)
        tokens = _bytes(self.tokens.to(torch.int32))
        if info.dtype != "float8":
            return [head, tokens, _bytes(self.states.to(_DTYPES[info.dtype]))]
        values, scales = to_fp8(self.states.view(rows, len(info.layer_ids), info.hidden_size))
        return [head, tokens, _bytes(scales), _bytes(values)]

    @classmethod
    def parse(cls, content: bytes, info: RingInfo) -> StatesRecord:
        """The record in these bytes, with FP8 states as bfloat16."""
        kind, key, first, rows = _head(_STATES_HEAD, content)
        if kind != _STATES or len(content) != _STATES_HEAD.size + rows * info.row_bytes:
            raise RingError(
                f"A record of {len(content):,} bytes is not one of {rows:,} rows of states."
            )
        at = _STATES_HEAD.size
        tokens = _tensor(content, at, torch.int32, (rows,))
        at += 4 * rows
        if info.dtype != "float8":
            states = _tensor(content, at, _DTYPES[info.dtype], (rows, info.width))
            return cls(key, first, tokens, states)
        layers = len(info.layer_ids)
        scales = _tensor(content, at, torch.float32, (rows, layers))
        at += 4 * rows * layers
        values = _tensor(content, at, FP8, (rows, layers, info.hidden_size))
        states = from_fp8(values, scales).to(torch.bfloat16)  # has more digits than FP8
        return cls(key, first, tokens, states.view(rows, info.width))


@dataclass(frozen=True)
class TextRecord:
    """The tokens of a finished request. Without a response: the request is not to be learnt from,
    and its states can be forgotten."""

    key: bytes
    prompt: list[int]
    response: list[int]
    temperature: float
    drafter_version: int | None = None  # of the registry; None: unknown

    def packed(self) -> list[bytes | memoryview]:
        version = _NO_VERSION if self.drafter_version is None else self.drafter_version
        sizes = len(self.prompt), len(self.response)
        head = _TEXT_HEAD.pack(_TEXT, self.key, *sizes, self.temperature, version)
        return [head, np.asarray([*self.prompt, *self.response], np.int32).tobytes()]

    @classmethod
    def parse(cls, content: bytes) -> TextRecord:
        kind, key, prompt, response, temperature, version = _head(_TEXT_HEAD, content)
        if kind != _TEXT or len(content) != _TEXT_HEAD.size + 4 * (prompt + response):
            raise RingError(
                f"A record of {len(content):,} bytes is not a text of {prompt + response:,} tokens."
            )
        tokens = np.frombuffer(content, np.int32, offset=_TEXT_HEAD.size).tolist()
        if not math.isfinite(temperature) or temperature < 0 or min(tokens, default=0) < 0:
            raise RingError("A record has a negative token or temperature.")
        return cls(
            key,
            tokens[:prompt],
            tokens[prompt:],
            temperature,
            None if version == _NO_VERSION else version,
        )


def _head(head: struct.Struct, content: bytes) -> tuple[Any, ...]:
    if len(content) < head.size:
        raise RingError(f"A record has {len(content)} bytes, expected {head.size} or more.")
    return head.unpack_from(content)


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data


def _tensor(content: bytes, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    # A copy: torch needs memory that it may write to, at an address that suits the type.
    part = bytearray(content[at : at + count * dtype.itemsize])
    return torch.frombuffer(part, dtype=dtype).view(shape)
