"""The training loss: drafted slots against the target's tokens and its distribution.

Labels are a mixture q of the answer's token and the target's own distribution at that position:

    q = (1 - distillation) * onehot(token) + distillation * softmax(teacher logits)
    loss = sum over slots of  weight * cross_entropy(q, softmax(draft logits))  /  denominator

The denominator is fixed in advance (the blocks of the whole step, on all ranks), so the gradient
of a step is a plain sum over blocks and does not depend on how they are split over ranks and
passes.

`loss_of_slots` never holds more than a chunk of logits. The output head is frozen, so the gradient
with respect to the hidden states can be computed in the forward pass, chunk by chunk, and the
logits are dropped. Blocks overlap, so one position has a slot in several blocks. Slots are taken
in the order of their positions: the target's distribution is computed once for each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from leadout.dflash.config import LogitScaling
from leadout.evaluate.target_weights import slots_per_chunk
from leadout.train.config import TrainConfig


class Slots(NamedTuple):
    """The labels of blocks' slots, [blocks, B-1]."""

    labels: Tensor  # indices into the rows of the head
    counted: Tensor  # True for supervised slots
    teacher: Tensor | None  # [positions, H]: the target's final states
    teacher_at: Tensor  # [blocks, B-1]: the state before each label, an index into `teacher`


class Head(NamedTuple):
    """The target's output head, which both models share, and what each does to its scores."""

    rows: Tensor  # [vocab rows, H], frozen
    target: LogitScaling = LogitScaling()
    draft: LogitScaling = LogitScaling()


def loss_of_slots(
    hidden: Tensor, slots: Slots, head: Head, config: TrainConfig, denominator: float
) -> tuple[Tensor, Tensor]:
    """The loss of hidden states [blocks, B-1, H], and which supervised slots predict the label.

    The loss is a scalar, already divided by the denominator; the hits are [blocks, B-1].
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
        head: Head,
        config: TrainConfig,
        denominator: float,
    ) -> tuple[Tensor, Tensor]:
        share, counted = config.distillation, slots.counted
        if share > 0 and slots.teacher is None:
            raise ValueError(f"distillation {share} requires the target's final states")
        states, labels, positions = hidden.flatten(0, 1), slots.labels.flatten(), slots.teacher_at
        label_entropy = torch.zeros(len(states), dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros_like(label_entropy)  # of the mixture
        hits = torch.zeros_like(labels, dtype=torch.bool)
        gradient = torch.zeros_like(states)  # of the entropy, by slot; weighted at the end
        supervised = counted.flatten().nonzero()[:, 0]
        positions = positions.flatten()[supervised]
        order = positions.argsort(stable=True)
        for chosen in torch.split(order, slots_per_chunk(head.rows)):
            part, label = supervised[chosen], labels[supervised[chosen]][:, None]  # [slots, 1]
            logits = head.draft.apply(_scores(states[part], head.rows))
            log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32)  # [slots, vocab rows]
            at_label = log_probs.gather(1, label)  # [slots, 1]
            label_entropy[part] = -at_label[:, 0]
            hits[part] = at_label[:, 0] >= log_probs.amax(-1)
            mixed = -(1 - share) * at_label[:, 0]
            teacher = None
            if share > 0 and slots.teacher is not None:
                teacher = _probabilities(slots.teacher, positions[chosen], head)
                mixed -= share * torch.linalg.vecdot(teacher, log_probs)
            entropy[part] = mixed
            logit_gradient = log_probs.exp_()  # becomes probabilities - mixture, in place
            if teacher is not None:
                logit_gradient.sub_(teacher, alpha=share)
            logit_gradient.scatter_add_(1, label, torch.full_like(at_label, share - 1))
            if head.draft.softcap is not None:  # the derivative of the cap
                logit_gradient.mul_(1 - (logits / head.draft.softcap).float().square())
            gradient[part] = logit_gradient.to(head.rows.dtype) @ head.rows
        weights = position_weights(label_entropy.view_as(counted), counted, config) / denominator
        scaled = weights[..., None] * head.draft.multiplier
        ctx.save_for_backward((gradient.view_as(hidden) * scaled).to(hidden.dtype))
        shaped_hits = hits.view_as(counted)
        ctx.mark_non_differentiable(shaped_hits)
        return (entropy.view_as(weights) * weights).sum(), shaped_hits

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0], None, None, None, None


def _probabilities(states: Tensor, positions: Tensor, head: Head) -> Tensor:
    """The target's distribution [slots, vocab rows] at ascending positions [slots] of its states.

    Computed once for each position.
    """
    different, place = torch.unique_consecutive(positions, return_inverse=True)
    with torch.no_grad():
        logits = head.target.apply(_scores(states[different], head.rows))
        return torch.softmax(logits, dim=-1, dtype=torch.float32)[place]


def _scores(hidden: Tensor, rows: Tensor) -> Tensor:
    return F.linear(hidden.to(rows.dtype), rows)
