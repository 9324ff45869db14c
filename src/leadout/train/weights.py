"""Weights to compute with and weights to train: the same, or rounded copies of finer ones.

In bfloat16 the drafter computes as it will be served, but the small changes of single steps would
be lost in its rounding. So the optimiser moves float32 masters, and the drafter gets them rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class TrainedWeights:
    """The float32 weights of a drafter, by name, and their gradients."""

    def __init__(self, drafter: nn.Module, precision: torch.dtype) -> None:
        self._module = drafter
        self._rounded = precision != torch.float32
        drafter.float()
        self.masters: dict[str, nn.Parameter] = dict(drafter.named_parameters())
        if self._rounded:
            self.masters = {n: nn.Parameter(p.detach().clone()) for n, p in self.masters.items()}
            drafter.to(precision)

    def clear_gradients(self) -> None:
        """Zeros, not nothing: a rank without blocks still takes part in the sum over ranks."""
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)

    def collect_gradients(self) -> None:
        """Take over what the last backward pass left at the drafter's own parameters."""
        if not self._rounded:
            return
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None:
                gradient = self.masters[name].grad
                assert gradient is not None
                gradient += parameter.grad
                parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Give the drafter the masters as they are now."""
        if self._rounded:
            for name, parameter in self._module.named_parameters():
                parameter.copy_(self.masters[name])

    def named(self) -> dict[str, Tensor]:
        return {name: master.detach() for name, master in self.masters.items()}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.copy_(weights[name])
        self.publish()
