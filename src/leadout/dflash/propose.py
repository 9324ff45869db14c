"""Proposers of drafts: the interface of the decoding loop, and its implementation by DFlash."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from leadout.dflash.cache import ContextCache
from leadout.dflash.drafter import Drafter
from leadout.dflash.mask import decode_masks
from leadout.dflash.target import Target
from leadout.dflash.verify import Sampling, distribution, draw


class Proposal(NamedTuple):
    tokens: Tensor  # [batch, K] in the target's vocabulary
    probabilities: Tensor | None  # [batch, K, vocab] of sampled drafts; None: greedy


class Proposer(Protocol):
    """Proposes the next tokens of a batch of rows, given the committed tokens."""

    def commit(self, states: Tensor, counts: Tensor) -> None:
        """Add the first `counts[r]` target states of row r, [batch, length, taps * size]."""

    def propose(self, anchors: Tensor, count: int) -> Proposal:
        """Propose `count` tokens after the anchors [batch]."""

    def keep_rows(self, index: Tensor) -> None:
        """Keep the rows in `index` [rows], in this order, and drop the others."""


class BlockProposer:
    """DFlash: all drafts of a step in one forward pass of the drafter.

    The block has only the necessary slots: the anchor and `count` masks. With `sampling`, drafts
    are drawn from the drafter's distribution; otherwise they are greedy.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        batch: int,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._drafter = drafter
        self._target = target
        self._sampling = sampling
        self._generator = generator
        weight = drafter.fc.weight
        self._cache = ContextCache(drafter.config, batch, weight.device, weight.dtype)

    def commit(self, states: Tensor, counts: Tensor) -> None:
        self._cache.append(self._drafter, states, counts)

    def keep_rows(self, index: Tensor) -> None:
        self._cache.keep_rows(index)

    @torch.no_grad()
    def propose(self, anchors: Tensor, count: int) -> Proposal:
        logits = self.block_logits(anchors, count)  # [batch, count, draft vocab]
        if self._sampling is None or self._generator is None:
            return Proposal(self._drafter.to_target_ids(logits.argmax(dim=-1)), None)
        probabilities = self._over_target_vocabulary(distribution(logits, self._sampling))
        return Proposal(draw(probabilities, self._generator), probabilities)

    def block_logits(self, anchors: Tensor, count: int) -> Tensor:
        """The drafter's logits for the tokens after the anchors, [batch, count, draft vocab]."""
        drafter, context = self._drafter, self._cache.view()
        block = drafter.block_tokens(anchors, count + 1)  # [batch, count + 1]
        positions = self._cache.lengths[:, None] + torch.arange(count + 1, device=anchors.device)
        hidden = drafter(
            drafter.embed(block, self._target.embedding),
            positions,
            context.layers,
            decode_masks(drafter.config.layers, positions, context.positions, context.valid),
        )
        return drafter.logits(hidden[:, 1:], self._target.head)

    def _over_target_vocabulary(self, probabilities: Tensor) -> Tensor:
        if self._drafter.d2t is None:
            return probabilities
        draft_ids = torch.arange(probabilities.shape[-1], device=probabilities.device)
        whole = probabilities.new_zeros(*probabilities.shape[:-1], self._target.vocab_size)
        whole[..., self._drafter.to_target_ids(draft_ids)] = probabilities
        return whole
