"""A drafter whose weights, gradients and optimizer state are sharded over the ranks (FSDP2).

Each rank keeps its rows of every weight, in float32. A layer's weights are gathered, in the
precision of matrix products, while the layer computes. Gradients are summed over the ranks, not
averaged: the loss of a step has a fixed denominator, so the sum is the gradient of the whole batch.

All ranks gather together, so they must run the same number of passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from leadout.evaluate.blocks import BlockForward
from leadout.evaluate.ranks import Ranks


def shard(forward: BlockForward, precision: torch.dtype, ranks: Ranks) -> None:
    """Replace the drafter's weights, the same on every rank, by this rank's rows of them."""
    # Inputs are cast where it is right to: rotations of keys and queries stay in float32.
    policy = MixedPrecisionPolicy(
        param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    mesh = init_device_mesh(ranks.device.type, (ranks.count,))
    forward.drafter.float()
    for layer in forward.drafter.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        register_fsdp_forward_method(layer, "key_value")  # of the context, apart from the block
    # Also the outermost: weights that stay gathered after a validation would become outdated.
    fully_shard(forward, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for module in _sharded_modules(forward):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


@contextmanager
def gathered(forward: BlockForward) -> Iterator[None]:
    """All weights on every rank, so that each may run as many forward passes as it likes.

    Without flex attention, which would be compiled for the shapes of every pass.
    """
    modules = _sharded_modules(forward)
    flex, forward.flex = forward.flex, False
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        forward.flex = flex
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(True, recurse=False)


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the rows of all ranks; every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _sharded_modules(forward: nn.Module) -> list[FSDPModule]:
    return [module for module in forward.modules() if isinstance(module, FSDPModule)]
