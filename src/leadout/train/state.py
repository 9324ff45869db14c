"""The state of a run: float32 master weights, optimizers, and checkpoints to continue from.

Anchors, sample order and learning rate follow from the step number, so weights, optimizer state
and a few numbers are all there is to save. Checkpoints are replaced atomically and hold tensors
only: nothing is pickled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from leadout.files import replacing
from leadout.train.config import TrainConfig

STATE = "state.safetensors"
BEST = "best.safetensors"
_STATUS_KEY = "run"  # in the metadata of the state file
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


def sum_gradients_over_ranks(parameters: Iterable[nn.Parameter]) -> None:
    """All-reduce the gradients; the sum is exact because the loss has a fixed denominator."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


class RunStatus(BaseModel):
    """How far a run has come."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0  # completed steps
    seconds: float = 0.0  # spent on training, including validation
    best_acceptance: float = 0.0
    best_step: int = 0
    validations_without_gain: int = 0
    finished: bool = False


def save_state(
    folder: Path, weights: MasterWeights, optimizers: Sequence[Optimizer], status: RunStatus
) -> None:
    tensors = {f"weights.{name}": tensor for name, tensor in weights.named().items()}
    for number, optimizer in enumerate(optimizers):
        for index, entries in optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                tensors[f"optimizer.{number}.{index}.{key}"] = torch.as_tensor(value)
    _save(folder / STATE, tensors, {_STATUS_KEY: status.model_dump_json()})


def read_status(folder: Path) -> RunStatus | None:
    """The status at the last checkpoint; None where there is no checkpoint."""
    path = folder / STATE
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as opened:
        return RunStatus.model_validate_json(opened.metadata()[_STATUS_KEY])


def load_state(
    folder: Path, weights: MasterWeights, optimizers: Sequence[Optimizer]
) -> RunStatus | None:
    """Load the last checkpoint into weights and optimizers; None where there is no checkpoint."""
    status = read_status(folder)
    if status is None:
        return None
    tensors = load_file(folder / STATE)
    weights.load(_with_prefix(tensors, "weights."))
    for number, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _with_prefix(tensors, f"optimizer.{number}.").items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    return status


def save_best(folder: Path, weights: MasterWeights) -> None:
    _save(folder / BEST, weights.named(), {})


def load_best(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / BEST)


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(contiguous, temporary, metadata=metadata)


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
