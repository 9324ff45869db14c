"""The state of a run: float32 master weights, and checkpoints to continue from.

Anchors, sample order and learning rate follow from the step number, so weights, optimizer state
and a few numbers are all there is to save. Checkpoints are replaced atomically and hold tensors
only: nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from leadout.checkpoints.store import load_tensors, open_tensors
from leadout.errors import shown
from leadout.evaluate.ranks import ALONE, Ranks
from leadout.files import first_problem, replacing
from leadout.train.config import TrainError
from leadout.train.sharding import whole

STATE = "state.safetensors"
BEST = "best.safetensors"
_WEIGHTS = "weights."  # before the names of tensors
_DTYPES = frozenset({"F32", "BF16", "F16", "F64"})
_STATUS_KEY = "run"  # in the metadata of the state file
_OTHERS_KEY = "others"  # there too: the files of the other ranks, as JSON
# Names, not paths: whatever a damaged file lists, only files of the same folder are opened.
_OTHERS: TypeAdapter[list[str]] = TypeAdapter(
    list[Annotated[str, Field(pattern=r"^state-[0-9]+-[0-9]+-of-[0-9]+\.safetensors$")]]
)


class MasterWeights:
    """The float32 weights of a drafter, by name, and their gradients.

    In bfloat16 the drafter computes as it will be served, but rounding would swallow the small
    updates of single steps. The optimizer therefore updates float32 master weights, and the
    drafter gets rounded copies of them. In float32 both are the same parameters, and so they are
    in a sharded drafter, which rounds its weights when it gathers them.
    """

    def __init__(
        self, drafter: nn.Module, precision: torch.dtype, *, sharded: bool = False
    ) -> None:
        self._drafter = drafter
        self.sharded = sharded
        self._has_copies = precision != torch.float32 and not sharded
        if not sharded:
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


class RunStatus(BaseModel):
    """How far a run has come."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    step: int = Field(default=0, ge=0)  # completed steps
    seconds: float = 0.0  # spent on training, including validation
    best_acceptance: float = 0.0
    best_step: int = Field(default=0, ge=0)
    validations_without_gain: int = Field(default=0, ge=0)
    finished: bool = False


def save_state(
    folder: Path,
    weights: MasterWeights,
    optimizers: Sequence[Optimizer],
    status: RunStatus,
    ranks: Ranks = ALONE,
) -> None:
    """Write a checkpoint; every rank calls it if the weights are sharded, else only the leader.

    The leader's file is written last and names those of the other ranks, so a kill at any moment
    leaves either the earlier checkpoint or the new one complete.
    """
    tensors = {_WEIGHTS + name: tensor for name, tensor in weights.named().items()}
    for number, optimizer in enumerate(optimizers):
        for index, entries in optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                tensors[f"optimizer.{number}.{index}.{key}"] = torch.as_tensor(value)
    others: list[str] = []
    if weights.sharded:
        names = [
            f"state-{status.step}-{rank}-of-{ranks.count}.safetensors"
            for rank in range(ranks.count)
        ]
        others = names[1:]
        if not ranks.is_leader:
            rows = {n: t.to_local() for n, t in tensors.items() if isinstance(t, DTensor)}
            _save(folder / names[ranks.rank], rows, {})
        ranks.barrier()  # the files of all ranks are complete
    if ranks.is_leader:
        local = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors.items()}
        metadata = {_STATUS_KEY: status.model_dump_json(), _OTHERS_KEY: json.dumps(others)}
        _save(folder / STATE, local, metadata)
        remove_stale_parts(folder)


def remove_stale_parts(folder: Path) -> None:
    """Remove the files of ranks that do not belong to the last checkpoint."""
    kept: list[str] = []
    if (folder / STATE).exists():
        with open_tensors(folder / STATE) as opened:
            kept = _others(folder / STATE, opened.metadata())
    for path in folder.glob("state-*.safetensors"):
        if path.name not in kept:
            path.unlink()


def read_status(folder: Path) -> RunStatus | None:
    """The status at the last checkpoint; None where there is no checkpoint."""
    path = folder / STATE
    if not path.exists():
        return None
    with open_tensors(path) as opened:
        return _status(path, opened.metadata())


def load_state(
    folder: Path, weights: MasterWeights, optimizers: Sequence[Optimizer]
) -> RunStatus | None:
    """Load the last checkpoint into weights and optimizers; None where there is no checkpoint.

    It may have been written by another number of ranks: each rank reads the rows that it needs.
    """
    if not (folder / STATE).exists():
        return None
    with ExitStack() as opened:
        checkpoint = _Checkpoint(folder, opened)
        weights.load(
            {name: checkpoint.read(_WEIGHTS + name, w) for name, w in weights.masters.items()}
        )
        for number, optimizer in enumerate(optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            prefix, state = f"optimizer.{number}.", dict[int, dict[str, Tensor]]()
            for name in checkpoint.names:
                if name.startswith(prefix):
                    index, _, key = name.removeprefix(prefix).partition(".")
                    if not index.isdecimal() or int(index) >= len(parameters):
                        raise _damaged(folder / STATE, f"{shown(name)} belongs to no weight")
                    value = checkpoint.read(name, parameters[int(index)])
                    state.setdefault(int(index), {})[key] = value
            if len({frozenset(entries) for entries in state.values()}) > 1:
                raise _damaged(folder / STATE, "the optimizer's state is not complete")
            groups = optimizer.state_dict()["param_groups"]
            try:
                optimizer.load_state_dict({"state": state, "param_groups": groups})
            except KeyError as problem:
                raise _damaged(folder / STATE, f"the optimizer lacks {problem}") from None
        return checkpoint.status


class _Checkpoint:
    """The files of a checkpoint: the rows of a tensor follow each other in the order of ranks."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self._path = folder / STATE
        first = opened.enter_context(open_tensors(self._path))
        metadata = first.metadata()
        self.status = _status(self._path, metadata)
        self.names: list[str] = list(first.keys())  # every tensor has rows of the leader
        self._files = [(first, set(self.names))]
        for name in _others(self._path, metadata):
            path = folder / name
            if not path.exists():
                raise TrainError(
                    f"{path} is missing: it holds a part of the checkpoint of step "
                    f"{self.status.step}. Runs with --sharded on several machines need an --out "
                    "that all of them share."
                )
            file = opened.enter_context(open_tensors(path))
            self._files.append((file, set(file.keys())))

    def read(self, name: str, like: Tensor) -> Tensor:
        """A tensor, with the rows of this rank only if it is sharded `like` its parameter."""
        parts = [file.get_slice(name) for file, names in self._files if name in names]
        if not parts:
            raise _damaged(self._path, f"{name} is missing")
        shapes = [list(part.get_shape()) for part in parts]
        if shapes == [[]] and not name.startswith(_WEIGHTS):  # the optimizer's number of steps
            scalar: Tensor = self._files[0][0].get_tensor(name)
            return scalar
        counts = [shape[0] if shape else 0 for shape in shapes]
        if any(shape[1:] != list(like.shape[1:]) for shape in shapes) or sum(counts) != len(like):
            found = f"{shown(name)} has shape {shown(shapes)}"
            raise _damaged(self._path, f"{found}, expected {list(like.shape)}")
        if any(part.get_dtype() not in _DTYPES for part in parts):
            raise _damaged(self._path, f"{shown(name)} holds no floating-point numbers")
        if not isinstance(like, DTensor):
            return torch.cat([part[:] for part in parts])
        mesh = like.device_mesh
        size = -(-sum(counts) // mesh.size())  # FSDP2 shards as torch.chunk does
        start, end, place = mesh.get_local_rank() * size, (mesh.get_local_rank() + 1) * size, 0
        rows = [torch.empty(0, *like.shape[1:])]  # a rank may have none
        for part, count in zip(parts, counts, strict=True):
            first, last = max(start - place, 0), min(end - place, count)
            if first < last:
                rows.append(part[first:last])
            place += count
        local = torch.cat(rows).to(like.device)
        return DTensor.from_local(
            local, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def _status(path: Path, metadata: Mapping[str, str] | None) -> RunStatus:
    try:
        return RunStatus.model_validate_json((metadata or {}).get(_STATUS_KEY, ""))
    except ValidationError as problem:
        raise _damaged(path, first_problem(problem, _STATUS_KEY)) from None


def _others(path: Path, metadata: Mapping[str, str] | None) -> list[str]:
    """The files of the other ranks, by the metadata of the leader's file."""
    try:
        return _OTHERS.validate_json((metadata or {}).get(_OTHERS_KEY, "[]"))
    except ValidationError as problem:
        raise _damaged(path, first_problem(problem, _OTHERS_KEY)) from None


def _damaged(path: Path, problem: str) -> TrainError:
    return TrainError(
        f"{path} is not a checkpoint that `leadout train` wrote for this drafter: {problem}. "
        "Restore the file, or start another run."
    )


def save_best(folder: Path, weights: MasterWeights, ranks: Ranks = ALONE) -> None:
    """Write the weights into one file; every rank calls it, the leader writes."""
    complete: dict[str, Tensor] = {}
    for name, tensor in weights.named().items():
        gathered = whole(tensor)  # one at a time: the device may not hold all of them
        if ranks.is_leader:
            complete[name] = gathered.cpu()
    if ranks.is_leader:
        _save(folder / BEST, complete, {})


def load_best(folder: Path) -> dict[str, Tensor]:
    return load_tensors(folder / BEST)


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(contiguous, temporary, metadata=metadata)
