"""Hidden states of the target for given sequences: computed on request, or kept on disk.

Computing them costs one pass of the target each time; keeping them on disk costs
(taps + 1) * hidden size * 2 bytes per token. `StateSource` is the interface for other sources,
for instance servers that run a target too large for the training process.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from leadout.dflash.target import Observation, Target
from leadout.evaluate.blocks import TrainingSequence, batch
from leadout.files import FileError

_WRITTEN = b"\x01"

Indexed = tuple[int, TrainingSequence]  # the index of a sample, and its sequence


def load_model(folder: Path, precision: torch.dtype) -> nn.Module:
    """A target in transformers, frozen."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=precision)
    loaded: nn.Module = model.eval().requires_grad_(False)
    return loaded


class StateSource(Protocol):
    """Returns the target's hidden states for sequences, padded to the longest of them."""

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        """States [rows, longest, taps * H] and final states [rows, longest, H]."""


class ComputedStates:
    """One pass of the target per call; the target is loaded at the first."""

    def __init__(self, load: Callable[[], Target]) -> None:
        self._load = load
        self._loaded: Target | None = None

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        if self._loaded is None:
            self._loaded = self._load()
        tokens, lengths, _ = batch([sequence for _, sequence in sequences])
        device = self._loaded.embedding.device
        places = torch.arange(tokens.shape[1])
        mask = (places < lengths[:, None]).long()
        return self._loaded.observe(tokens.to(device), mask.to(device))


class StatesOnDisk:
    """A file of states that is filled on demand: missing samples are computed and written.

    The file has a fixed place for every token of every sample; a second file (.marks) records
    which samples are complete. States are read, not memory-mapped, so that resident memory does
    not grow with the data.
    """

    def __init__(
        self,
        path: Path,
        source: StateSource,
        lengths: Sequence[int],
        *,
        taps: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._path = path
        self._source = source
        self._hidden_size = hidden_size
        self._width = (taps + 1) * hidden_size
        self._dtype = dtype
        self._token_bytes = self._width * dtype.itemsize
        starts = torch.tensor([0, *lengths]).cumsum(0)
        self._starts = array("q", starts[:-1].tolist())  # [samples], in tokens
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._file, int(starts[-1]) * self._token_bytes)  # sparse until written
        self._marks = os.open(path.with_suffix(".marks"), os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._marks, len(lengths))

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        missing = [item for item in sequences if not self._is_written(item[0])]
        if missing:
            self._write(missing)
        longest = max(len(sequence) for _, sequence in sequences)
        wide = torch.zeros(len(sequences), longest, self._width, dtype=self._dtype)
        for row, (index, sequence) in enumerate(sequences):
            self._read_into(wide[row, : len(sequence)], index)
        return Observation(wide[:, :, : -self._hidden_size], wide[:, :, -self._hidden_size :])

    def has_all(self, indices: Iterable[int]) -> bool:
        """Whether the states of all these samples are in the file."""
        return all(self._is_written(index) for index in indices)

    def _write(self, items: Sequence[Indexed]) -> None:
        observed = self._source.observe(items)
        for row, (index, sequence) in enumerate(items):
            both = torch.cat([observed.states[row], observed.final[row]], dim=-1)
            content = both[: len(sequence)].to("cpu", self._dtype).contiguous()
            view, offset = _bytes_of(content), self._starts[index] * self._token_bytes
            while view:
                count = os.pwrite(self._file, view, offset)
                view, offset = view[count:], offset + count
        for index, _ in items:  # last, so that a killed write is computed again
            os.pwrite(self._marks, _WRITTEN, index)

    def _is_written(self, index: int) -> bool:
        return os.pread(self._marks, 1, index) == _WRITTEN

    def _read_into(self, place: Tensor, index: int) -> None:
        view, offset = _bytes_of(place), self._starts[index] * self._token_bytes
        while view:
            count = os.preadv(self._file, [view], offset)
            if count == 0:
                raise FileError(
                    f"{self._path} ends before sample {index}. Delete it and its .marks file; the "
                    "states are then computed again."
                )
            view, offset = view[count:], offset + count


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(tensor.view(torch.uint8).numpy().data).cast("B")
