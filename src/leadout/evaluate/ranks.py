"""Data parallelism: a single process, or several started by torchrun."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from leadout.errors import LeadoutError

SHARED_SECONDS = 10.0  # until a new file must be visible on other machines
# Until a rank gives up waiting for the others. One of them may wait for a server of states, which
# gives up first (`ClientSettings.give_up_seconds`) and whose error says what to do.
WAIT = timedelta(minutes=30)


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

    def any(self, *values: bool) -> list[bool]:
        """Which of these values are true on any rank."""
        if self.count == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.int64, device=self.device)
        distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
        return [bool(value) for value in shared.tolist()]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        if self.count > 1:
            values = values.to(self.device)
            distributed.all_reduce(values)
        return values.cpu()

    def max(self, value: int) -> int:
        """The largest value of all ranks."""
        if self.count == 1:
            return value
        shared = torch.tensor([value], device=self.device)
        distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
        return int(shared.item())


ALONE = Ranks(0, 1, torch.device("cpu"))  # one process on the processor


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The process group of torchrun; without torchrun, this process alone.

    After an error the group is left as it is: to destroy it means to wait for ranks that may be
    waiting for this one, and the error would not be shown. The process ends anyway.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if count == 1:
        yield Ranks(0, 1, device)
        return
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=WAIT)
    yield Ranks(distributed.get_rank(), count, device)
    distributed.destroy_process_group()


class NotSharedError(LeadoutError):
    """Ranks that see different folders or files under the same path."""


def require_shared(ranks: Ranks, flag: str, folder: Path) -> None:
    """Refuse a folder that is not the same one on all ranks, as on disks of several machines."""
    if ranks.count == 1:
        return
    number = torch.randint(2**62, (1,), device=ranks.device)
    distributed.broadcast(number, src=0)
    mark = folder / f".seen-by-all-ranks-{int(number):x}"
    if ranks.is_leader:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    ranks.barrier()
    deadline = time.monotonic() + SHARED_SECONDS
    while not (seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    missing = torch.zeros(ranks.count, dtype=torch.int64)
    missing[ranks.rank] = int(not seen)
    blind = torch.nonzero(ranks.sum(missing)).flatten().tolist()
    if ranks.is_leader:
        mark.unlink()
    if blind:
        numbers = ", ".join(map(str, blind))
        raise NotSharedError(
            f"{flag} {folder}: not the same folder on all ranks; what rank 0 writes there is not "
            f"visible to rank {numbers}. Choose a folder on a file system that all machines share."
        )


def require_equal(ranks: Ranks, what: str, digest: str) -> None:
    """Refuse ranks that have read something else; `digest` is the SHA-256 of it, in hex."""
    numbers = torch.zeros(ranks.count, dtype=torch.int64)
    numbers[ranks.rank] = int(digest[:15], 16)
    found = ranks.sum(numbers).tolist()
    others = [str(rank) for rank, number in enumerate(found) if number != found[0]]
    if others:
        raise NotSharedError(
            f"{what} differs between ranks: rank {', '.join(others)} and rank 0 have read "
            "different files. Give all ranks the same files, and do not change them meanwhile."
        )


def empty_device_cache() -> None:
    """Return the memory of dropped tensors to the device, for another process to use."""
    gc.collect()  # modules and hooks refer to each other in cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
