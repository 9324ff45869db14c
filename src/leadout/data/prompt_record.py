"""Which prompts a drafter was trained on, as hashes in a small file beside it.

A prompt is its token ids, chat template included. The file holds 8 bytes of a hash of each prompt,
not the prompt; of very many prompts it holds only those with the smallest hashes, which is a random
selection. Someone who has the file can find out whether a certain prompt is among them, but cannot
list the prompts.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from leadout.errors import LeadoutError
from leadout.files import FileError, MissingFileError, read_model, write_text

NAME = "training-prompts.json"
MAX_HASHES = 65536  # about 700 kB
_BYTES = 8


class PromptRecordError(LeadoutError):
    """A record of training prompts that cannot be read."""


def prompt_hash(prompt: Sequence[int]) -> int:
    content = np.asarray(prompt, dtype="<u4").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=_BYTES).digest(), "little")


def _decoded(value: object) -> object:
    if not isinstance(value, str):
        return value
    content = base64.b64decode(value, validate=True)
    if len(content) % _BYTES:
        raise ValueError(f"has {len(content)} bytes, expected a multiple of {_BYTES}")
    return frozenset(np.frombuffer(content, dtype="<u8").tolist())


def _encoded(hashes: frozenset[int]) -> str:
    return base64.b64encode(np.array(sorted(hashes), dtype="<u8").tobytes()).decode()


class PromptRecord(BaseModel):
    """Hashes of the prompts of a training."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: int = Field(ge=0)  # different ones
    hashes: Annotated[frozenset[int], BeforeValidator(_decoded), PlainSerializer(_encoded)]

    @classmethod
    def of(cls, prompts: Iterable[Sequence[int]]) -> Self:
        found = {prompt_hash(prompt) for prompt in prompts}
        return cls(prompts=len(found), hashes=frozenset(sorted(found)[:MAX_HASHES]))

    @property
    def share(self) -> float:
        """The share of the prompts that this record can recognize."""
        return len(self.hashes) / max(self.prompts, 1)

    def __contains__(self, prompt: Sequence[int]) -> bool:
        return prompt_hash(prompt) in self.hashes

    def write(self, folder: Path) -> None:
        write_text(folder / NAME, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The record beside a drafter, if there is one."""
        try:
            return read_model(folder / NAME, cls)
        except MissingFileError:
            return None
        except FileError as problem:
            raise PromptRecordError(
                f"{problem} Expected a file that `leadout train` wrote; remove it to check without "
                "it."
            ) from None
