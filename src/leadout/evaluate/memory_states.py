"""Hidden states that are already in memory, as a source for training and evaluation.

Served sequences come with the states of the target that served them, so nothing is computed. Two
things are missing, and neither is needed:

- The last token of a sequence has no state. A block at an anchor sees the context before it only,
  and the last anchor is the last token but one.
- The beginning of a sequence may have come from the server's prefix cache. Where all layers of the
  drafter have a window, the blocks of the answer do not see what is far before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from leadout.dflash.config import DrafterConfig
from leadout.dflash.target import Observation
from leadout.evaluate.hidden_states import Indexed, ReadableStates, StateSource, announce


class KeptStates(NamedTuple):
    """The states of one sequence from position `first` on."""

    first: int
    rows: Tensor  # [positions, taps * H]


def first_position_needed(config: DrafterConfig, prompt_length: int) -> int:
    """The first position that the blocks of an answer after such a prompt see."""
    windows = [layer.window for layer in config.layers]
    widest = max((each for each in windows if each is not None), default=0)
    if None in windows:
        return 0
    # The first anchor is the first token of the answer, and sees itself as part of the window.
    return max(0, prompt_length - widest + 1)


class StatesInMemory:
    """A `StateSource`: some sequences by name from memory, all others from another source.

    There are no final states, so it cannot be distilled from; zeros are in their place.
    """

    def __init__(
        self,
        kept: Mapping[str, KeptStates],
        others: StateSource,
        *,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._kept = kept
        self._others = others
        self._hidden_size = hidden_size
        self._dtype = dtype

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        longest = max(len(sequence) for _, sequence in sequences)
        known = [self._kept.get(sequence.name) for _, sequence in sequences]
        rest = self._rest(sequences)
        # Padded to the longest of the rest, which may be shorter than the longest of all.
        observed = iter(self._others.observe(rest).states) if rest else iter(())
        found: list[Tensor] = []
        for (_, sequence), own in zip(sequences, known, strict=True):
            if own is None:
                found.append(next(observed)[: len(sequence)])
                continue
            before = own.rows.new_zeros(own.first, own.rows.shape[-1])
            found.append(torch.cat([before, own.rows])[: len(sequence)])
        states = torch.zeros(len(found), longest, found[0].shape[-1], dtype=self._dtype)
        for row, each in enumerate(found):
            states[row, : len(each)] = each.to("cpu", self._dtype)
        final = torch.zeros(1, 1, self._hidden_size, dtype=self._dtype)
        return Observation(states, final.expand(len(found), longest, -1))

    def can_read(self, sequences: Sequence[Indexed]) -> bool:
        rest = self._rest(sequences)
        others = self._others
        return not rest or (isinstance(others, ReadableStates) and others.can_read(rest))

    def announce(self, sequences: Iterable[Indexed]) -> None:
        announce(self._others, self._rest(sequences))

    def _rest(self, sequences: Iterable[Indexed]) -> list[Indexed]:
        return [item for item in sequences if item[1].name not in self._kept]
