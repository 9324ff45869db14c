"""The drafter on many blocks at once: the same computation as at serving, many anchors a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leadout.dflash.drafter import Drafter
from leadout.train.anchors import Blocks
from leadout.train.attention import attend_in_blocks, block_masks


class BlockForward(nn.Module):
    """A drafter and the frozen embedding it borrows; one module, so that it compiles as one."""

    def __init__(self, drafter: Drafter, embedding: Tensor) -> None:
        super().__init__()
        self.drafter = drafter
        self._embedding = embedding  # [vocab, H], the target's own

    def forward(self, states: Tensor, anchors: Tensor, anchor_tokens: Tensor) -> Tensor:
        """Hidden states of the slots after the anchors, [rows, blocks, B-1, H].

        `states` is [rows, length, taps * H], `anchors` and `anchor_tokens` are [rows, blocks].
        """
        config = self.drafter.config
        rows, length, _ = states.shape
        blocks = anchors.shape[1]
        places = torch.arange(length, device=states.device).expand(rows, -1)
        context = self.drafter.context_kv(self.drafter.context_features(states), places)
        slots = torch.arange(config.block_size, device=states.device)
        positions = (anchors[:, :, None] + slots).flatten(1)  # [rows, blocks * B]
        tokens = self.drafter.block_tokens(anchor_tokens.flatten(), config.block_size)
        hidden: Tensor = self.drafter(
            self.drafter.embed(tokens.view(rows, -1), self._embedding),
            positions,
            context,
            block_masks(config.layers, anchors, config.block_size, length),
            attend_in_blocks,
        )
        return hidden.view(rows, blocks, config.block_size, -1)[:, :, 1:]


class DraftedSlots(NamedTuple):
    """The supervised blocks of a batch, flat."""

    hidden: Tensor  # [blocks, B-1, H]
    labels: Tensor  # [blocks, B-1]
    counted: Tensor  # [blocks, B-1]
    teacher: Tensor  # [blocks, B-1, H]: what the target's head read to choose each label


def drafted_slots(
    forward: Callable[..., Tensor], states: Tensor, final: Tensor, tokens: Tensor, blocks: Blocks
) -> DraftedSlots:
    """Run the drafter and drop the blocks that only fill the shape."""
    device = states.device
    anchors = blocks.anchors.to(device)
    anchor_tokens = tokens.gather(1, blocks.anchors).to(device)
    hidden = forward(states, anchors, anchor_tokens)
    kept = blocks.counted.any(-1).to(device)  # [rows, blocks]
    slots = blocks.labels.shape[-1]
    # The label at p + k was chosen from the target's state at p + k - 1.
    places = (anchors[:, :, None] + torch.arange(slots, device=device)).flatten(1)
    places = places.clamp(max=final.shape[1] - 1)
    teacher = final.gather(1, places[:, :, None].expand(-1, -1, final.shape[2]))
    return DraftedSlots(
        hidden[kept],
        blocks.labels.to(device)[kept],
        blocks.counted.to(device)[kept],
        teacher.view(*anchors.shape, slots, -1)[kept],
    )
