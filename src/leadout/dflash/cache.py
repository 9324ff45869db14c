"""The drafter's context cache: keys and values of committed tokens, computed once per token.

Only tokens that the target has committed are added, so rejected drafts leave no trace. Each row of
a batch has its own length. Everything at or past a row's length is always zero: masked values are
multiplied by an attention weight of zero, which only hides them if they are finite.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from leadout.dflash.config import DrafterConfig
from leadout.dflash.drafter import Drafter, KeyValue


class ContextView(NamedTuple):
    """The cache as the drafter reads it, every row padded to the longest."""

    layers: list[KeyValue]  # each [batch, kv_heads, context, head_dim]
    positions: Tensor  # [batch, context]
    valid: Tensor  # boolean [batch, context], false at padding


class ContextCache:
    """Keys and values of every draft layer for the committed tokens of a batch of rows.

    The index of a token in its row is its position: rows start at position 0 and have no gaps.
    """

    def __init__(
        self, config: DrafterConfig, batch: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        empty = torch.zeros(
            (batch, config.num_kv_heads, 0, config.head_dim), device=device, dtype=dtype
        )
        self._layers = [KeyValue(empty, empty) for _ in config.layers]
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)  # [batch]

    def append(self, drafter: Drafter, states: Tensor, counts: Tensor) -> None:
        """Commit the first `counts[r]` of row r's tapped states, [batch, length, taps * width]."""
        self._require_counts(counts, states.shape[1])
        self._reserve(int((self.lengths + counts).max()))
        places = torch.arange(states.shape[1], device=states.device)
        committed = places < counts[:, None]  # [batch, length]
        row = committed.nonzero()[:, 0]  # [tokens]
        position = (self.lengths[:, None] + places)[committed]  # [tokens]
        with torch.no_grad():
            # Only committed tokens are computed, packed from all rows into one.
            features = drafter.context_features(states[committed][None])
            packed = drafter.context_kv(features, position[None])
            for stored, new in zip(self._layers, packed, strict=True):
                stored.keys[row, :, position] = new.keys[0].transpose(0, 1)
                stored.values[row, :, position] = new.values[0].transpose(0, 1)
        self.lengths = self.lengths + counts

    def keep_rows(self, index: Tensor) -> None:
        """Keep the rows in `index` [rows], in this order, and drop the others."""
        # Layer by layer, so that at most one layer is in memory twice.
        for number, stored in enumerate(self._layers):
            self._layers[number] = KeyValue(stored.keys[index], stored.values[index])
        self.lengths = self.lengths[index]

    def view(self) -> ContextView:
        """The committed context, as views of the storage: read only."""
        longest = int(self.lengths.max())
        places = torch.arange(longest, device=self.lengths.device)
        return ContextView(
            layers=[KeyValue(*(part[:, :, :longest] for part in kv)) for kv in self._layers],
            positions=places.expand(len(self.lengths), -1),
            valid=places < self.lengths[:, None],
        )

    def _require_counts(self, counts: Tensor, length: int) -> None:
        if bool(((counts < 0) | (counts > length)).any()):
            raise ValueError(
                f"counts are {counts.tolist()}; expected each between 0 and {length}, the states "
                "per row"
            )

    def _reserve(self, length: int) -> None:
        capacity = self._layers[0].keys.shape[2]
        if length <= capacity:
            return
        # Doubling keeps the total cost of copying linear in the committed tokens.
        extra = max(length, 2 * capacity) - capacity
        for number, stored in enumerate(self._layers):
            self._layers[number] = KeyValue(*(_with_zeros(part, extra) for part in stored))


def _with_zeros(stored: Tensor, extra: int) -> Tensor:
    batch, heads, _, head_dim = stored.shape
    return torch.cat([stored, stored.new_zeros(batch, heads, extra, head_dim)], dim=2)
