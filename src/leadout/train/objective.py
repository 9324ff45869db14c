"""The loss of drafted slots against the target's answers and distribution.

Labels are a mixture q of the answer's token and the target's own distribution at that position:

    q = (1 - distillation) * onehot(token) + distillation * softmax(teacher logits)
    loss = sum over slots of  weight * cross_entropy(q, softmax(draft logits))  /  denominator

The denominator is fixed before anything is computed (the blocks of the whole step, on all ranks),
so the gradient of a step is a plain sum over blocks: the same however they are split over ranks
and passes.

`loss_of_slots` never holds more than a chunk of logits. The output head is frozen, so the gradient
of the loss by the hidden states is known as soon as a chunk's logits are: it is computed in the
forward pass and the logits are dropped. `eager_loss_of_slots` says the same in plain autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Slots whose logits are held at once: on CPUs as many as stay in the cache.
CHUNK_SLOTS = {"cpu": 256, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Objective:
    """What a slot is to be like, and how much it counts."""

    distillation: float
    position_weights: Literal["dpace", "exponential"]
    gamma: float
    dpace_alpha: float


@dataclass(frozen=True, slots=True)
class Scores:
    """Hidden states to logits over some rows of the target's frozen head."""

    head: Tensor  # [vocab rows, H]
    bias: Tensor | None = None  # [vocab rows]
    multiplier: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden.to(self.head.dtype), self.head, self.bias)
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def gradient_of_hidden(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """The gradient by the hidden states, from that by `logits`, both [slots, vocab rows]."""
        if self.softcap is not None:
            gradient = gradient * (1 - (logits / self.softcap).square())
        if self.multiplier != 1.0:
            gradient = gradient * self.multiplier
        return gradient.to(self.head.dtype) @ self.head


class Slots(NamedTuple):
    """What the loss needs to know of blocks' slots, all [blocks, B-1] but the states."""

    labels: Tensor  # indices into the scores
    counted: Tensor  # boolean
    teacher: Tensor | None  # [blocks, B-1, H]: what the target's head read before each label


class SlotLoss(NamedTuple):
    loss: Tensor  # scalar, already divided by the denominator
    hits: Tensor  # [blocks, B-1]: the best guess is the label, and the slot counts


def loss_of_slots(
    hidden: Tensor, slots: Slots, scores: Scores, objective: Objective, denominator: float
) -> SlotLoss:
    """The loss of hidden states [blocks, B-1, H] in chunks of whole blocks."""
    loss, hits = _ChunkedLoss.apply(hidden, slots, scores, objective, denominator)  # type: ignore[no-untyped-call]
    return SlotLoss(loss, hits)


def eager_loss_of_slots(
    hidden: Tensor, slots: Slots, scores: Scores, objective: Objective, denominator: float
) -> SlotLoss:
    """The reference: all logits at once, gradients by autograd."""
    logits = scores(hidden)
    share = objective.distillation
    mixture = (1 - share) * F.one_hot(slots.labels, logits.shape[-1]).float()
    taught = _taught(slots, scores, share)
    if taught is not None:
        mixture = mixture + share * taught
    entropy = -(mixture * F.log_softmax(logits, dim=-1, dtype=torch.float32)).sum(-1)
    weights = position_weights(_label_entropy(logits, slots.labels), slots.counted, objective)
    hits = (logits.argmax(-1) == slots.labels) & slots.counted
    return SlotLoss((entropy * weights).sum() / denominator, hits)


def position_weights(label_entropy: Tensor, counted: Tensor, objective: Objective) -> Tensor:
    """How much each slot counts, [blocks, B-1]; 0 where it is not supervised; no gradient.

    Exponential: exp(-(k-1)/gamma) for slot k. D-PACE: the expected number of slots, from this one
    on, that are reached when each stands with its present odds (floored by alpha): slots that hold
    up many others count most.
    """
    mask = counted.float()
    if objective.position_weights == "exponential":
        place = torch.arange(counted.shape[-1], device=counted.device)
        return mask * torch.exp(-place / objective.gamma)
    alpha = objective.dpace_alpha
    odds = (1 - alpha) * torch.exp(-label_entropy.detach()) + alpha
    reached = torch.where(counted, odds, 1.0).cumprod(dim=-1) * mask
    return mask * reached.flip(-1).cumsum(-1).flip(-1)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        slots: Slots,
        scores: Scores,
        objective: Objective,
        denominator: float,
    ) -> tuple[Tensor, Tensor]:
        blocks, per_block, _ = hidden.shape
        step = max(1, CHUNK_SLOTS.get(hidden.device.type, 2048) // per_block)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden)
        hits = torch.empty_like(slots.counted)
        for start in range(0, blocks, step):
            part = slice(start, start + step)
            teacher = None if slots.teacher is None else slots.teacher[part]
            chunk = Slots(slots.labels[part], slots.counted[part], teacher)
            logits = scores(hidden[part])
            log_odds = F.log_softmax(logits, dim=-1, dtype=torch.float32)
            at_label = log_odds.gather(-1, chunk.labels[..., None])  # [blocks, B-1, 1]
            weights = position_weights(-at_label[..., 0], chunk.counted, objective)
            weights = weights / denominator
            hits[part] = (at_label[..., 0] >= log_odds.amax(-1)) & chunk.counted
            share = objective.distillation
            entropy = -(1 - share) * at_label[..., 0]
            taught = _taught(chunk, scores, share)
            if taught is not None:
                entropy -= share * torch.linalg.vecdot(taught, log_odds)
            total += (entropy * weights).sum()
            by_logits = log_odds.exp_()  # becomes odds - mixture, in place
            if taught is not None:
                by_logits.sub_(taught, alpha=share)
            by_logits.scatter_add_(
                -1, chunk.labels[..., None], torch.full_like(at_label, share - 1)
            )
            by_logits.mul_(weights[..., None])
            gradient[part] = scores.gradient_of_hidden(logits, by_logits)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0], None, None, None, None


def _taught(slots: Slots, scores: Scores, share: float) -> Tensor | None:
    """The target's own distribution at each slot, [blocks, B-1, vocab rows]."""
    if share == 0:
        return None
    if slots.teacher is None:
        raise ValueError(f"distillation: found {share}, wanted 0 where there are no final states")
    with torch.no_grad():
        return torch.softmax(scores(slots.teacher), dim=-1, dtype=torch.float32)


def _label_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return -F.log_softmax(logits, dim=-1, dtype=torch.float32).gather(-1, labels[..., None])[..., 0]
