"""How weights move: Muon or AdamW, warm-up, then a cosine down to zero."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from leadout.train.config import TrainConfig

ADAM_BETAS = (0.9, 0.95)
MUON_MOMENTUM = 0.95


def make_optimizers(weights: Mapping[str, nn.Parameter], config: TrainConfig) -> list[Optimizer]:
    """Matrices and vectors apart: norms have no weight decay, and Muon takes matrices only."""
    matrices = [weight for weight in weights.values() if weight.dim() == 2]
    vectors = [weight for weight in weights.values() if weight.dim() != 2]
    if config.optimizer == "adamw":
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return [AdamW(groups, lr=config.learning_rate, betas=ADAM_BETAS)]
    muon = Muon(
        matrices,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=MUON_MOMENTUM,
        adjust_lr_fn="match_rms_adamw",  # so that one learning rate serves both
    )
    adam = AdamW(vectors, lr=config.learning_rate, betas=ADAM_BETAS, weight_decay=0.0)
    return [muon, adam]


def learning_rate_at(step: int, steps: int, config: TrainConfig) -> float:
    """For step 0..steps-1."""
    warmup = max(1, round(config.warmup * steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizers: Iterable[Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def sum_over_ranks(parameters: Iterable[nn.Parameter]) -> None:
    """Add up the gradients of all ranks; the loss's fixed denominator makes the sum exact."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    return nn.utils.clip_grad_norm_(list(parameters), largest)
