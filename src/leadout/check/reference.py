"""The reference's tensors for a block, by the names under which an engine is compared with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leadout.dflash.config import DrafterConfig
from leadout.dflash.drafter import Drafter, KeyValue
from leadout.dflash.mask import decode_masks
from leadout.train.borrowed import Borrowed

FEATURES, FINAL, LOGITS = "context features", "final hidden states", "logits"

Tensors = dict[str, Tensor]  # each with one row a token or slot


def state_name(layer_id: int) -> str:
    return f"target layer {layer_id} states"


def keys_name(layer: int) -> str:
    return f"layer {layer} context keys"


def values_name(layer: int) -> str:
    return f"layer {layer} context values"


def hidden_name(layer: int) -> str:
    return f"layer {layer} block hidden states"


def names_in_order(config: DrafterConfig) -> list[str]:
    """Every tensor after those that it is computed from."""
    return [
        *(state_name(layer_id) for layer_id in config.target_layer_ids),
        FEATURES,
        *(
            name(layer)
            for layer in range(config.num_layers)
            for name in (keys_name, values_name, hidden_name)
        ),
        FINAL,
        LOGITS,
    ]


class Reference:
    """A drafter that has read the target's states [length, taps * width] of one text."""

    def __init__(self, drafter: Drafter, borrowed: Borrowed, states: Tensor) -> None:
        self._drafter = drafter
        self._borrowed = borrowed
        self._positions = torch.arange(len(states))[None]
        with torch.no_grad():
            self._features = drafter.context_features(states[None])  # [1, length, H]
            self._context = drafter.context_kv(self._features, self._positions)

    def context(self, positions: Tensor) -> Tensors:
        """What is kept of the tokens at these positions."""
        tensors = {FEATURES: self._features[0, positions]}
        for layer, kept in enumerate(self._context):
            tensors[keys_name(layer)] = kept.keys[0].transpose(0, 1)[positions]
            tensors[values_name(layer)] = kept.values[0].transpose(0, 1)[positions]
        return tensors

    @torch.no_grad()
    def block(self, anchor: int, token: int, count: int) -> Tensors:
        """Of the block of `count` drafts after the anchor, a token at this position."""
        drafter = self._drafter
        positions = torch.arange(anchor, anchor + count + 1)[None]
        seen = self._positions[:, :anchor]
        masks = decode_masks(
            drafter.config.layers, positions, seen, torch.ones_like(seen, dtype=torch.bool)
        )
        block = drafter.block_tokens(torch.tensor([token]), count + 1)
        with _heard(drafter) as hidden:
            final = drafter(
                drafter.embed(block, self._borrowed.embedding),
                positions,
                [KeyValue(*(part[:, :, :anchor] for part in kept)) for kept in self._context],
                masks,
            )
        return {
            **{hidden_name(layer): states[0] for layer, states in enumerate(hidden)},
            FINAL: final[0, 1:],  # nothing is drafted from the anchor's slot
            LOGITS: drafter.logits(final[0, 1:], self._head),
        }

    def _head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._borrowed.head.to(hidden.dtype))


@contextmanager
def _heard(drafter: Drafter) -> Iterator[list[Tensor]]:
    """The output of every layer, in order."""
    outputs: list[Tensor] = []

    def keep(_layer: nn.Module, _inputs: object, output: Tensor) -> None:
        outputs.append(output)

    hear: Callable[..., None] = keep
    handles = [layer.register_forward_hook(hear) for layer in drafter.layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
