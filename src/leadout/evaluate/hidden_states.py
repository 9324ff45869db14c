"""Hidden states of the target for given sequences: computed on request, shared, or kept on disk.

Computing them costs one pass of the target each time; keeping them on disk costs
(taps + 1) * hidden size * 2 bytes per token. `StateSource` is the interface for other sources,
for instance servers that run a target too large for the training process.
"""

from __future__ import annotations

import os
import platform
import shutil
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from leadout.dflash.target import Observation, Target
from leadout.evaluate.blocks import TrainingSequence, batch
from leadout.files import FileError

_WRITTEN = b"\x01"

Indexed = tuple[int, TrainingSequence]  # the index of a sample, and its sequence


def compute_dtype(precision: torch.dtype, device: torch.device) -> torch.dtype:
    """The type in which to compute with weights and states of this precision.

    It is the same one, except on processors without instructions for bfloat16: they emulate them,
    and are about twice as fast in float32, which is more exact.
    """
    if precision == torch.bfloat16 and device.type == "cpu" and not _has_bfloat16():
        return torch.float32
    return precision


@cache
def _has_bfloat16() -> bool:
    if platform.machine() not in ("x86_64", "AMD64"):
        return True  # not known: as it was asked for
    has_avx, has_amx = (
        torch.cpu._is_avx512_bf16_supported(),
        torch.cpu._is_amx_tile_supported(),
    )
    return bool(has_avx or has_amx)


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


@runtime_checkable
class ReadableStates(StateSource, Protocol):
    """States that may be ready to be read, by any thread and without the training device."""

    def can_read(self, sequences: Sequence[Indexed]) -> bool:
        """Whether `observe` would only read."""


@runtime_checkable
class AnnouncedStates(StateSource, Protocol):
    """States that are fetched ahead if it is known which come next."""

    def announce(self, sequences: Iterable[Indexed]) -> None:
        """Fetch these in the background, in this order."""


def announce(source: StateSource, sequences: Iterable[Indexed]) -> None:
    """Tell a source what will be observed next, if it can make use of that."""
    if isinstance(source, AnnouncedStates):
        source.announce(sequences)


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


class ReferenceTarget(Protocol):
    """The target as drafters are compared with it: in transformers, or served by vLLM."""

    def source(self, layer_ids: Sequence[int]) -> StateSource:
        """The states of these layers, in this order."""

    def next_logits(self, tokens: Sequence[int], last_portion: int = 0) -> Tensor:
        """Logits [vocab] of the token after a text, which is read at once or in two portions."""


class LoadedTarget:
    """A target in transformers."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model

    def source(self, layer_ids: Sequence[int]) -> StateSource:
        return ComputedStates(lambda: Target(self._model, layer_ids))

    def next_logits(self, tokens: Sequence[int], last_portion: int = 0) -> Tensor:
        text = torch.tensor([list(tokens)], device=next(self._model.parameters()).device)
        before, rest = text[:, :-last_portion], text[:, -last_portion:]
        past: Any = None
        with torch.no_grad():
            if 0 < before.shape[1] < text.shape[1]:
                read = self._model(input_ids=before, use_cache=True, logits_to_keep=1)
                past = read.past_key_values
            output = self._model(
                input_ids=text if past is None else rest, past_key_values=past, logits_to_keep=1
            )
        logits: Tensor = output.logits[0, -1].float().cpu()
        return logits


def as_reference(target: nn.Module | ReferenceTarget) -> ReferenceTarget:
    """A model of transformers becomes a reference; a reference stays one."""
    return LoadedTarget(target) if isinstance(target, nn.Module) else target


class SharedStates:
    """The target's states at every layer that any of several drafters taps.

    Each text is read once by the target, whatever the number of drafters. With `keep_all` the
    states of all texts stay in memory, otherwise those of the last one.
    """

    def __init__(
        self, target: nn.Module | ReferenceTarget, layer_ids: Iterable[int], *, keep_all: bool
    ) -> None:
        self.layer_ids = sorted(set(layer_ids))
        self._source = as_reference(target).source(self.layer_ids)
        self._keep_all = keep_all
        self._kept: dict[int, Observation] = {}

    def observe(self, item: Indexed) -> Observation:
        """States [1, length, layers * H] and final states [1, length, H] of one text."""
        number, _ = item
        if number not in self._kept:
            if not self._keep_all:
                self._kept.clear()
            self._kept[number] = self._source.observe([item])
        return self._kept[number]

    def tapped_at(self, layer_ids: Sequence[int], *, normed_last_tap: bool = False) -> StateSource:
        """The states as a drafter with these taps reads them.

        With `normed_last_tap` the last tap is the final state after the target's final norm.
        """
        return _Taps(self, layer_ids, normed_last_tap)


@dataclass(frozen=True, slots=True)
class _Taps:
    shared: SharedStates
    layer_ids: Sequence[int]
    normed_last_tap: bool

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        (item,) = sequences
        states, final = self.shared.observe(item)
        parts = torch.split(states, final.shape[-1], dim=-1)
        by_layer = dict(zip(self.shared.layer_ids, parts, strict=True))
        taps = [by_layer[layer] for layer in self.layer_ids]
        if self.normed_last_tap:
            taps[-1] = final
        return Observation(torch.cat(taps, dim=-1), final)


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
        self._size = int(starts[-1]) * self._token_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._file, self._size)  # sparse until written
        self._marks = os.open(path.with_suffix(".marks"), os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._marks, len(lengths))

    def require_room(self) -> None:
        """Refuse a file that its disk cannot hold, before the first state is computed."""
        needed = self._size - os.fstat(self._file).st_blocks * 512
        free = shutil.disk_usage(self._path.parent).free
        if needed > free:
            raise FileError(
                f"The target's hidden states need {needed:,} more bytes in {self._path.parent}, "
                f"but {free:,} are free. Use --states compute, or a folder on another disk."
            )

    def close(self) -> None:
        """Close the files; the disk space of deleted ones is free only then."""
        os.close(self._file)
        os.close(self._marks)

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        self.fill(sequences)
        longest = max(len(sequence) for _, sequence in sequences)
        wide = torch.zeros(len(sequences), longest, self._width, dtype=self._dtype)
        for row, (index, sequence) in enumerate(sequences):
            self._read_into(wide[row, : len(sequence)], index)
        return Observation(wide[:, :, : -self._hidden_size], wide[:, :, -self._hidden_size :])

    def fill(self, sequences: Sequence[Indexed]) -> None:
        """Compute and write the states that are missing."""
        missing = [item for item in sequences if not self._is_written(item[0])]
        if missing:
            self._write(missing)

    def can_read(self, sequences: Sequence[Indexed]) -> bool:
        source = self._source
        fetched = isinstance(source, ReadableStates) and source.can_read(sequences)
        return fetched or self.has_all(index for index, _ in sequences)

    def announce(self, sequences: Iterable[Indexed]) -> None:
        announce(self._source, [item for item in sequences if not self._is_written(item[0])])

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
        # After a power failure there must be no mark of states that never reached the disk.
        os.fdatasync(self._file)
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
