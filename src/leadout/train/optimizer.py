"""Optimizers of a run: AdamW, or Muon with its updates shared out over the ranks.

Muon orthogonalizes the update of every matrix with a few Newton-Schulz iterations, which are most
of its cost. With several ranks, each matrix is orthogonalized by one of them (chosen so that all
have about the same work) and sent to the others; the momentum is cheap and stays where the weights
are: a copy on every rank, or sharded like them. On CPUs the iterations are in the precision of the
run: in bfloat16 as in torch, except on processors without instructions for it, where that takes
several times as long, and in float32 if the run is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Muon, Optimizer

from leadout.evaluate.hidden_states import compute_dtype
from leadout.train.config import TrainConfig
from leadout.train.sharding import whole

ADAM_BETAS = (0.9, 0.95)
MUON_MOMENTUM = 0.95
# From this ratio of the sides of a matrix on, iterations without its long side take less time.
LONG = 2
# Rows of the parts in which a symmetric product is computed, at least; smaller ones are slower.
PART_ROWS = 256
MAX_PARTS = 4


def make_optimizers(
    weights: Mapping[str, nn.Parameter], config: TrainConfig, ranks: int = 1
) -> list[Optimizer]:
    """Separate groups for matrices and vectors: norms have no weight decay, Muon needs matrices."""
    matrices = [weight for weight in weights.values() if weight.dim() == 2]
    vectors = [weight for weight in weights.values() if weight.dim() != 2]
    if config.optimizer == "adamw":
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return [AdamW(groups, lr=config.learning_rate, betas=ADAM_BETAS)]
    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "momentum": MUON_MOMENTUM,
        "adjust_lr_fn": "match_rms_adamw",  # so that one learning rate fits both optimizers
    }
    on_cpu = all(weight.device.type == "cpu" for weight in matrices)
    if ranks == 1 and not on_cpu:
        muon = Muon(matrices, **settings)
    else:
        precision: torch.dtype = getattr(torch, config.precision)
        muon = SharedMuon(matrices, **settings)
        muon.on_cpus = compute_dtype(precision, torch.device("cpu"))
    adam = AdamW(vectors, lr=config.learning_rate, betas=ADAM_BETAS, weight_decay=0.0)
    return [muon, adam]


class SharedMuon(Muon):
    """Muon over all ranks of the process group, or on a CPU without one.

    The weights are plain tensors with the same gradient on every rank, or sharded `DTensor`s.
    """

    on_cpus = torch.float32  # the type of the iterations there

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        rank, ranks = 0, 1
        if distributed.is_initialized():
            rank, ranks = distributed.get_rank(), distributed.get_world_size()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            owners = share_out([tuple(w.shape) for w in weights], ranks)
            own: dict[int, Tensor] = {}
            for number, (weight, owner) in enumerate(zip(weights, owners, strict=True)):
                update = whole(self._with_momentum(weight, group))  # of all ranks, if sharded
                if owner == rank:
                    own[number] = update
            dtype = self.on_cpus
            changes = {number: _change(update, group, dtype) for number, update in own.items()}
            for number, (weight, owner) in enumerate(zip(weights, owners, strict=True)):
                change = changes.pop(number, None)
                if change is None:
                    change = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                if ranks > 1:
                    distributed.broadcast(change, src=owner)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(_part(change, weight))

    def _with_momentum(self, weight: nn.Parameter, group: dict[str, Any]) -> Tensor:
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def _change(update: Tensor, group: dict[str, Any], on_cpus: torch.dtype) -> Tensor:
    """What Muon adds to a weight for this update, without weight decay.

    On GPUs it is a step of torch's Muon from zero, with the momentum left out.
    """
    if update.device.type == "cpu":
        # The rate of "match_rms_adamw".
        rate = group["lr"] * 0.2 * math.sqrt(max(update.shape))
        found = orthogonalized(update, group["ns_coefficients"], group["ns_steps"], on_cpus)
        return found.mul_(-rate)
    change = nn.Parameter(torch.zeros_like(update))
    change.grad = update
    settings = {key: group[key] for key in ("lr", "ns_coefficients", "eps", "ns_steps")}
    plain: Optimizer = Muon(
        [change],
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        adjust_lr_fn=group["adjust_lr_fn"],
        **settings,
    )
    plain.step()
    return change.detach()


def orthogonalized(
    update: Tensor,
    coefficients: tuple[float, float, float],
    iterations: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The Newton-Schulz iterations of Muon, computed in `dtype`: singular values come near 1.

    Any shape [rows, columns]; computed with the shorter side first, where products are smaller. An
    iteration multiplies X by P = linear + cubic G + quintic G^2 with G = X X^T. The next G is
    P G P, so a long X need not take part: it is multiplied by the product of all P at the end. In
    bfloat16 that would add up too many rounding errors.
    """
    linear, cubic, quintic = coefficients
    is_tall = update.shape[0] > update.shape[1]
    found = update.T.float() if is_tall else update.float()
    found = (found / found.norm().clamp(min=1e-7)).to(dtype)
    shorter, longer = found.shape
    if dtype == torch.float32 and longer > LONG * shorter:
        gram, product = symmetric_product(found, found.T), None
        for number in range(iterations):
            factor = symmetric_product(gram, gram).mul_(quintic).add_(gram, alpha=cubic)
            factor.diagonal().add_(linear)
            product = factor if product is None else factor @ product
            if number + 1 < iterations:
                gram = symmetric_product(factor @ gram, factor)
        found = found if product is None else product @ found
    else:
        for _ in range(iterations):
            gram = symmetric_product(found, found.T)
            factor = symmetric_product(gram, gram).mul_(quintic).add_(gram, alpha=cubic)
            found = torch.addmm(found, factor, found, beta=linear)
    return (found.T if is_tall else found).float().contiguous()


def symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """`left` [n, m] times `right` [m, n] where the result is symmetric: computes its upper part."""
    rows = len(left)
    size = max(PART_ROWS, -(-rows // MAX_PARTS))
    product = left.new_empty(rows, rows)
    for first in range(0, rows, size):
        last = min(first + size, rows)
        torch.mm(left[first:last], right[:, first:], out=product[first:last, first:])
        product[last:, first:last] = product[first:last, last:].T
    return product


def share_out(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[int]:
    """The rank that orthogonalizes each matrix: the largest first, to the rank with least work."""
    costs = [min(shape) ** 2 * max(shape) for shape in shapes]
    work, owners = [0] * ranks, [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda each: -costs[each]):
        owners[number] = work.index(min(work))
        work[owners[number]] += costs[number]
    return owners


def _part(change: Tensor, weight: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has, if the weight is sharded."""
    if not isinstance(weight, DTensor):
        return change
    return distribute_tensor(change, weight.device_mesh, weight.placements, src_data_rank=None)


def learning_rate_at(step: int, steps: int, config: TrainConfig) -> float:
    """The rate of step 0 to steps - 1: linear warmup, then cosine decay to zero."""
    warmup = max(1, round(config.warmup * steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def sum_gradients_over_ranks(parameters: Iterable[nn.Parameter]) -> None:
    """All-reduce the gradients; the sum is exact because the loss has a fixed denominator."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
