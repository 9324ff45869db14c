"""The training loss: drafted slots against the target's tokens and its distribution.

Labels are a mixture q of the answer's token and the target's own distribution at that position:

    q = (1 - distillation) * onehot(token) + distillation * softmax(teacher logits)
    loss = sum over slots of  weight * cross_entropy(q, softmax(draft logits))  /  denominator

The denominator is fixed in advance (the blocks of the whole step, on all ranks), so the gradient
of a step is a plain sum over blocks and does not depend on how they are split over ranks and
passes.

`loss_of_slots` never holds more than a chunk of logits. The output head is frozen, so the gradient
with respect to the hidden states can be computed in the forward pass, chunk by chunk, and the
logits are dropped. `eager_loss_of_slots` is the same in plain autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Slots whose logits are held at once; on CPUs as many as fit into the cache.
CHUNK_SLOTS = {"cpu": 256, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Objective:
    """The labels and the weights of the slots; fields as in `TrainConfig`."""

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
        """The gradient of the hidden states, given that of `logits` (both [..., vocab rows])."""
        if self.softcap is not None:
            gradient = gradient * (1 - (logits / self.softcap).square())
        if self.multiplier != 1.0:
            gradient = gradient * self.multiplier
        return gradient.to(self.head.dtype) @ self.head


class Slots(NamedTuple):
    """The labels of blocks' slots, [blocks, B-1]."""

    labels: Tensor  # indices into the vocabulary rows of the scores
    counted: Tensor  # True for supervised slots
    teacher: Tensor | None  # [blocks, B-1, H]: the target's final state before each label


class SlotLoss(NamedTuple):
    loss: Tensor  # scalar, already divided by the denominator
    hits: Tensor  # [blocks, B-1]: the slot counts and its most likely token is the label


def loss_of_slots(
    hidden: Tensor, slots: Slots, scores: Scores, objective: Objective, denominator: float
) -> SlotLoss:
    """The loss of hidden states [blocks, B-1, H], computed in chunks of whole blocks."""
    loss, hits = _ChunkedLoss.apply(hidden, slots, scores, objective, denominator)  # type: ignore[no-untyped-call]
    return SlotLoss(loss, hits)


def eager_loss_of_slots(
    hidden: Tensor, slots: Slots, scores: Scores, objective: Objective, denominator: float
) -> SlotLoss:
    """The reference: all logits at once, gradients by autograd."""
    logits = scores(hidden)
    share = objective.distillation
    mixture = (1 - share) * F.one_hot(slots.labels, logits.shape[-1]).float()
    teacher_probs = _teacher_probabilities(slots, scores, share)
    if teacher_probs is not None:
        mixture = mixture + share * teacher_probs
    entropy = -(mixture * F.log_softmax(logits, dim=-1, dtype=torch.float32)).sum(-1)
    weights = position_weights(_label_entropy(logits, slots.labels), slots.counted, objective)
    hits = (logits.argmax(-1) == slots.labels) & slots.counted
    return SlotLoss((entropy * weights).sum() / denominator, hits)


def position_weights(label_entropy: Tensor, counted: Tensor, objective: Objective) -> Tensor:
    """The weight of each slot, [blocks, B-1]; 0 if it is not supervised; without gradient.

    Exponential: exp(-(k-1)/gamma) for slot k. D-PACE: the expected number of accepted slots from
    this one on, if each is accepted with probability (1 - alpha) * p + alpha, where p is the
    drafter's present probability of the label. Slots on which many others depend weigh most.
    """
    mask = counted.float()
    if objective.position_weights == "exponential":
        place = torch.arange(counted.shape[-1], device=counted.device)
        return mask * torch.exp(-place / objective.gamma)
    alpha = objective.dpace_alpha
    accepted = (1 - alpha) * torch.exp(-label_entropy.detach()) + alpha
    reached = torch.where(counted, accepted, 1.0).cumprod(dim=-1) * mask
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
            log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32)
            at_label = log_probs.gather(-1, chunk.labels[..., None])  # [blocks, B-1, 1]
            weights = position_weights(-at_label[..., 0], chunk.counted, objective)
            weights = weights / denominator
            hits[part] = (at_label[..., 0] >= log_probs.amax(-1)) & chunk.counted
            share = objective.distillation
            entropy = -(1 - share) * at_label[..., 0]
            teacher_probs = _teacher_probabilities(chunk, scores, share)
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
            gradient[part] = scores.gradient_of_hidden(logits, logit_gradient)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0], None, None, None, None


def _teacher_probabilities(slots: Slots, scores: Scores, share: float) -> Tensor | None:
    """The target's distribution at each slot, [blocks, B-1, vocab rows]; None if share is 0."""
    if share == 0:
        return None
    if slots.teacher is None:
        raise ValueError(f"distillation {share} requires the target's final states")
    with torch.no_grad():
        return torch.softmax(scores(slots.teacher), dim=-1, dtype=torch.float32)


def _label_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return -F.log_softmax(logits, dim=-1, dtype=torch.float32).gather(-1, labels[..., None])[..., 0]
