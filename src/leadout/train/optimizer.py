"""How weights are updated: float32 master weights, Muon or AdamW, warmup and cosine decay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from leadout.train.config import TrainConfig

ADAM_BETAS = (0.9, 0.95)
MUON_MOMENTUM = 0.95


class MasterWeights:
    """The float32 weights of a drafter, by name, and their gradients.

    In bfloat16 the drafter computes as it will be served, but rounding would swallow the small
    updates of single steps. The optimizer therefore updates float32 master weights, and the
    drafter gets rounded copies of them. In float32 both are the same parameters.
    """

    def __init__(self, drafter: nn.Module, precision: torch.dtype) -> None:
        self._drafter = drafter
        self._has_copies = precision != torch.float32
        drafter.float()
        self.masters: dict[str, nn.Parameter] = dict(drafter.named_parameters())
        if self._has_copies:
            self.masters = {n: nn.Parameter(p.detach().clone()) for n, p in self.masters.items()}
            drafter.to(precision)

    def clear_gradients(self) -> None:
        """Set to zero, not None: a rank without blocks still takes part in the sum over ranks."""
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)

    def collect_gradients(self) -> None:
        """Add the gradients that the last backward pass left at the drafter's parameters."""
        if not self._has_copies:
            return
        for name, parameter in self._drafter.named_parameters():
            if parameter.grad is not None:
                gradient = self.masters[name].grad
                assert gradient is not None
                gradient += parameter.grad
                parameter.grad = None

    @torch.no_grad()
    def update_drafter(self) -> None:
        """Round the master weights into the drafter."""
        if self._has_copies:
            for name, parameter in self._drafter.named_parameters():
                parameter.copy_(self.masters[name])

    def named(self) -> dict[str, Tensor]:
        return {name: master.detach() for name, master in self.masters.items()}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.copy_(weights[name])
        self.update_drafter()


def make_optimizers(weights: Mapping[str, nn.Parameter], config: TrainConfig) -> list[Optimizer]:
    """Separate groups for matrices and vectors: norms have no weight decay, Muon needs matrices."""
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
        adjust_lr_fn="match_rms_adamw",  # so that one learning rate fits both optimizers
    )
    adam = AdamW(vectors, lr=config.learning_rate, betas=ADAM_BETAS, weight_decay=0.0)
    return [muon, adam]


def learning_rate_at(step: int, steps: int, config: TrainConfig) -> float:
    """The rate of step 0 to steps - 1: linear warmup, then cosine decay to zero."""
    warmup = max(1, round(config.warmup * steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizers: Iterable[Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def sum_gradients_over_ranks(parameters: Iterable[nn.Parameter]) -> None:
    """All-reduce the gradients; the sum is exact because the loss has a fixed denominator."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
