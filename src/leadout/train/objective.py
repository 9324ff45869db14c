"""The training loss: drafted slots against the target's tokens and its distribution.

Labels are a mixture q of the answer's token and the target's own distribution at that position:

    q = (1 - distillation) * onehot(token) + distillation * softmax(teacher logits)
    loss = sum over slots of  weight * cross_entropy(q, softmax(draft logits))  /  denominator

The denominator is fixed in advance (the blocks of the whole step, on all ranks), so the gradient
of a step is a plain sum over blocks and does not depend on how they are split over ranks and
passes.

`loss_of_slots` never holds more than a chunk of logits. The output head is frozen, so the gradient
with respect to the hidden states can be computed in the forward pass, chunk by chunk, and the
logits are dropped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from leadout.train.config import TrainConfig

# Slots whose logits are held at once; on CPUs as many as fit into the cache.
CHUNK_SLOTS = {"cpu": 256, "cuda": 8192}


class Slots(NamedTuple):
    """The labels of blocks' slots, [blocks, B-1]."""

    labels: Tensor  # indices into the rows of the head
    counted: Tensor  # True for supervised slots
    teacher: Tensor | None  # [blocks, B-1, H]: the target's final state before each label


def loss_of_slots(
    hidden: Tensor, slots: Slots, head: Tensor, config: TrainConfig, denominator: float
) -> tuple[Tensor, Tensor]:
    """The loss of hidden states [blocks, B-1, H], and which supervised slots predict the label.

    `head` [vocab rows, H] is frozen. The loss is a scalar, already divided by the denominator; the
    hits are [blocks, B-1].
    """
    loss, hits = _ChunkedLoss.apply(hidden, slots, head, config, denominator)  # type: ignore[no-untyped-call]
    return loss, hits


def position_weights(label_entropy: Tensor, counted: Tensor, config: TrainConfig) -> Tensor:
    """The weight of each slot, [blocks, B-1]; 0 if it is not supervised; without gradient.

    Exponential: exp(-(k-1)/gamma) for slot k. D-PACE: the expected number of accepted slots from
    this one on, if each is accepted with probability (1 - alpha) * p + alpha, where p is the
    drafter's present probability of the label. Slots on which many others depend weigh most.
    """
    mask = counted.float()
    if config.position_weights == "exponential":
        place = torch.arange(counted.shape[-1], device=counted.device)
        return mask * torch.exp(-place / config.gamma)
    alpha = config.dpace_alpha
    accepted = (1 - alpha) * torch.exp(-label_entropy.detach()) + alpha
    reached = torch.where(counted, accepted, 1.0).cumprod(dim=-1) * mask
    return mask * reached.flip(-1).cumsum(-1).flip(-1)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        slots: Slots,
        head: Tensor,
        config: TrainConfig,
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
            log_probs = F.log_softmax(_logits(hidden[part], head), dim=-1, dtype=torch.float32)
            at_label = log_probs.gather(-1, chunk.labels[..., None])  # [blocks, B-1, 1]
            weights = position_weights(-at_label[..., 0], chunk.counted, config) / denominator
            hits[part] = (at_label[..., 0] >= log_probs.amax(-1)) & chunk.counted
            share = config.distillation
            entropy = -(1 - share) * at_label[..., 0]
            teacher_probs = _teacher_probabilities(chunk, head, share)
            if teacher_probs is not None:
                entropy -= share * torch.linalg.vecdot(teacher_probs, log_probs)
            total += (entropy * weights).sum()
            logit_gradient = log_probs.exp_()  # becomes probabilities - mixture, in place
            if teacher_probs is not None:
                logit_gradient.sub_(teacher_probs, alpha=share)
            logit_gradient.scatter_add_(
                -1, chunk.labels[..., None], torch.full_like(at_label, share - 1)
            )
            logit_gradient.mul_(weights[..., None])
            gradient[part] = logit_gradient.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0], None, None, None, None


def _teacher_probabilities(slots: Slots, head: Tensor, share: float) -> Tensor | None:
    """The target's distribution at each slot, [blocks, B-1, vocab rows]; None if share is 0."""
    if share == 0:
        return None
    if slots.teacher is None:
        raise ValueError(f"distillation {share} requires the target's final states")
    with torch.no_grad():
        return torch.softmax(_logits(slots.teacher, head), dim=-1, dtype=torch.float32)


def _logits(hidden: Tensor, head: Tensor) -> Tensor:
    return F.linear(hidden.to(head.dtype), head)
