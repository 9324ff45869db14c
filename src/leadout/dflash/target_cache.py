"""The target's keys and values for a batch whose rows accept different numbers of tokens.

Rows are right-aligned: a row with n committed tokens occupies the last n places, those before them
are masked. So the distance between two tokens of a row is the distance of their places, which is
what sliding-window layers of a target measure, and all rows continue at the same place.

It has the few methods that transformers models call on a cache.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TargetCache:
    """Keys and values of every target layer, each [batch, kv_heads, width, head_dim].

    The first step must be the prompts of these lengths, padded on the left.
    """

    def __init__(self, prompt_lengths: Tensor) -> None:
        self.lengths = prompt_lengths  # [batch]
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    # Called by transformers models.

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: object
    ) -> tuple[Tensor, Tensor]:
        if layer_idx == len(self._keys):
            self._keys.append(keys)
            self._values.append(values)
        else:
            self._keys[layer_idx] = torch.cat([self._keys[layer_idx], keys], dim=2)
            self._values[layer_idx] = torch.cat([self._values[layer_idx], values], dim=2)
        return self._keys[layer_idx], self._values[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._keys[layer_idx].shape[2] if layer_idx < len(self._keys) else 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0

    # Called by the decoding loop.

    def attention_mask(self, new: int) -> Tensor:
        """[batch, width + new]: 1 at committed tokens and at the `new` ones of the next step."""
        width = self.get_seq_length()
        places = torch.arange(width + new, device=self.lengths.device)
        return (places >= width - self.lengths[:, None]).long()

    def commit(self, new: int, counts: Tensor) -> None:
        """Of the `new` tokens that a step has just added, keep the first `counts[r]` of row r."""
        self.lengths = self.lengths + counts
        old_width = self.get_seq_length() - new
        width = int(self.lengths.max())
        # Row r ends at place old_width + counts[r] and has to end at place `width`.
        shift = old_width + counts - width  # [batch]
        places = torch.arange(width, device=counts.device) + shift[:, None]
        self._gather(places.clamp(min=0))

    def keep_rows(self, index: Tensor) -> None:
        """Keep the rows in `index` [rows], in this order, and drop the others."""
        self._keys = [keys[index] for keys in self._keys]
        self._values = [values[index] for values in self._values]
        self.lengths = self.lengths[index]

    def _gather(self, places: Tensor) -> None:
        for stored in (self._keys, self._values):
            for layer, tensor in enumerate(stored):
                wide = places[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
                stored[layer] = tensor.gather(2, wide)
