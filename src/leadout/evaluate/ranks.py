"""Data parallelism: a single process, or several started by torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed


@dataclass(frozen=True, slots=True)
class Ranks:
    rank: int
    count: int
    device: torch.device

    @property
    def is_leader(self) -> bool:
        """Rank 0, which writes files and reports to the user."""
        return self.rank == 0

    def barrier(self) -> None:
        if self.count > 1:
            distributed.barrier()

    def broadcast(self, value: bool) -> bool:
        """The leader's value, on every rank."""
        if self.count == 1:
            return value
        shared = torch.tensor([int(value)], device=self.device)
        distributed.broadcast(shared, src=0)
        return bool(shared.item())

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        if self.count > 1:
            values = values.to(self.device)
            distributed.all_reduce(values)
        return values.cpu()


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The process group of torchrun; without torchrun, this process alone."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if count == 1:
        yield Ranks(0, 1, device)
        return
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield Ranks(distributed.get_rank(), count, device)
    finally:
        distributed.destroy_process_group()
