"""Parts of a run on several ranks, for torchrun: Muon on random matrices, and folders.

torchrun --standalone --nproc-per-node 2 -m support.rank_parts OUT

Every rank writes its weights, and the error for a folder that is not shared.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from leadout.evaluate import ranks as ranks_module
from leadout.evaluate.ranks import NotSharedError, Ranks, require_shared
from leadout.train import optimizer
from leadout.train.config import TrainConfig

SHAPES = [(12, 20), (20, 12), (7, 9), (16, 16), (3, 24)]  # 7 and 3 rows are not even on 2 ranks
STEPS = 4


def make_muon(weights: dict[str, nn.Parameter], ranks: int = 1) -> Optimizer:
    config = TrainConfig(optimizer="muon", weight_decay=0.1)
    norm = nn.Parameter(torch.ones(3))  # a run always has some, for AdamW
    muon, _ = optimizer.make_optimizers(weights | {"norm": norm}, config, ranks)
    return muon


def matrices() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        f"{number}": nn.Parameter(torch.randn(shape, generator=generator))
        for number, shape in enumerate(SHAPES)
    }


def train_with(muon: Optimizer, weights: dict[str, nn.Parameter]) -> None:
    """Some steps with random gradients, the same on every rank."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        for weight in weights.values():
            gradient = torch.randn(weight.shape, generator=generator)
            if isinstance(weight, DTensor):
                gradient = distribute_tensor(gradient, weight.device_mesh, weight.placements)
            weight.grad = gradient
        muon.step()


def main() -> None:
    out = Path(sys.argv[1])
    distributed.init_process_group("gloo")
    rank, count = distributed.get_rank(), distributed.get_world_size()
    orthogonalized = []
    change = optimizer._change

    def counted(*arguments: object) -> torch.Tensor:
        orthogonalized.append(1)
        return change(*arguments)  # type: ignore[arg-type]

    optimizer._change = counted
    mesh = init_device_mesh("cpu", (count,))
    for kind in ("replicated", "sharded"):
        weights = matrices()
        if kind == "sharded":
            weights = {
                name: nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
                for name, weight in weights.items()
            }
        train_with(make_muon(weights, count), weights)
        if kind == "replicated":
            (out / f"orthogonalized-{rank}").write_text(f"{len(orthogonalized) // STEPS}")
        whole = {
            name: weight.full_tensor() if isinstance(weight, DTensor) else weight
            for name, weight in weights.items()
        }
        save_file({n: w.detach() for n, w in whole.items()}, out / f"{kind}-{rank}.safetensors")
    ranks = Ranks(rank, count, torch.device("cpu"))
    require_shared(ranks, "--out", out / "shared")
    ranks_module.SHARED_SECONDS = 0.2
    try:
        require_shared(ranks, "--out", out / f"disk-of-{rank}")
    except NotSharedError as problem:
        (out / f"not-shared-{rank}").write_text(str(problem))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
