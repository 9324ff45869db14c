"""What the drafter's weights give away by themselves, one tensor at a time.

Weights that were rounded to a few levels and stored as ordinary numbers load and run like any
others; only the number of distinct values in a group shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from leadout.check.result import Finding, Gravity
from leadout.checkpoints import Checkpoint, CheckpointError
from leadout.checkpoints.store import read_tensors
from leadout.checkpoints.tensors import DRAFT_TO_TARGET, TARGET_TO_DRAFT, require_vocabulary

LEVELS = 16  # of 4 bits
# Groups that share a scale. In the smallest, trained weights have about 30 distinct values, even
# as bfloat16.
GROUPS = (128, 64, 32)
SAMPLED_ROWS = 64
SHARE = 0.99  # of the sampled groups
# All that the drafter knows passes through these; any other dead tensor silences one branch.
VITAL = frozenset(
    {"fc.weight", "hidden_norm.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight"}
)
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Coarse:
    """Groups of a matrix with few distinct values."""

    along: str  # "columns": the group lies within a row
    group: int
    distinct: int


def weight_findings(checkpoint: Checkpoint) -> list[Finding]:
    broken: dict[str, int] = {}
    dead: dict[str, float] = {}
    coarse: dict[str, Coarse] = {}
    matrices = 0
    try:
        for name, tensor in read_tensors(checkpoint.tensors.drafter):
            if name == DRAFT_TO_TARGET:
                _require_vocabulary(checkpoint, tensor)
                continue
            not_finite = int((~torch.isfinite(tensor)).sum())
            if not_finite:
                broken[name] = not_finite
                continue
            matrices += tensor.dim() == 2
            constant = constant_of(tensor)
            if constant is not None and (tensor.dim() == 2 or _is_norm(name, constant)):
                dead[name] = constant
            elif tensor.dim() == 2 and (found := coarseness(tensor)) is not None:
                coarse[name] = found
    except CheckpointError as problem:
        return [
            Finding(
                name="drafter-unreadable",
                gravity=Gravity.UNFIT,
                message=str(problem).removesuffix(f". {problem.remedy}"),
                remedy=problem.remedy,
            )
        ]
    return [*_broken(broken), *_dead(dead), *_quantised(coarse, matrices)]


def constant_of(tensor: Tensor) -> float | None:
    """The one value of all elements, if there is but one."""
    low, high = torch.aminmax(tensor)
    return low.item() if bool(low == high) else None


def coarseness(matrix: Tensor) -> Coarse | None:
    """The largest groups in which hardly any have more than `LEVELS` distinct values."""
    for along, rows in (("columns", matrix), ("rows", matrix.T)):
        count, width = rows.shape
        picked = torch.linspace(0, count - 1, min(count, SAMPLED_ROWS)).long()
        sampled = rows[picked]
        for group in sorted({width, *GROUPS}, reverse=True):
            if not min(GROUPS) <= group <= width:
                continue
            groups = sampled[:, : width // group * group].reshape(-1, group)
            ordered = groups.sort(dim=-1).values
            distinct = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(-1)
            few = distinct <= LEVELS
            if few.double().mean() >= SHARE:
                return Coarse(along, group, int(distinct[few].max()))
    return None


def _require_vocabulary(checkpoint: Checkpoint, draft_to_target: Tensor) -> None:
    marks = checkpoint.tensors.target_to_draft
    loaded = {} if marks is None else dict(read_tensors({TARGET_TO_DRAFT: marks}))
    require_vocabulary(
        draft_to_target,
        loaded.get(TARGET_TO_DRAFT),
        checkpoint.config.vocab_size,
        checkpoint.path,
    )


def _is_norm(name: str, constant: float) -> bool:
    """A norm of zeros ends all that passes it; any other constant is where norms start."""
    return name.endswith("norm.weight") and constant == 0.0


def _broken(found: dict[str, int]) -> list[Finding]:
    if not found:
        return []
    return [
        Finding(
            name="weights-not-finite",
            gravity=Gravity.UNFIT,
            message=(
                f"found {sum(found.values())} values that are NaN or infinite in "
                f"{_names(found)}, wanted finite ones"
            ),
            evidence={"values": sum(found.values()), "tensors": len(found)},
            remedy="Download the checkpoint again, or train it anew.",
        )
    ]


def _dead(found: dict[str, float]) -> list[Finding]:
    if not found:
        return []
    values = sorted(set(found.values()))
    return [
        Finding(
            name="weights-dead",
            gravity=Gravity.UNFIT if VITAL & found.keys() else Gravity.DOUBTFUL,
            message=(
                f"found nothing but the value {values[0]:g} in {_names(found)}, wanted trained "
                "weights: nothing passes through them"
            ),
            evidence={"tensors": len(found), "values": values},
            remedy="The export or the training of this drafter went wrong; take another one.",
        )
    ]


def _quantised(found: dict[str, Coarse], matrices: int) -> list[Finding]:
    if not found:
        return []
    first = next(iter(found.values()))
    return [
        Finding(
            name="weights-quantised",
            gravity=Gravity.DOUBTFUL,
            message=(
                f"found at most {first.distinct} distinct values in groups of {first.group} "
                f"{first.along} of {_names(found)}, {len(found)} of {matrices} matrices: weights "
                "that were quantised and stored as ordinary numbers again, with their rounding"
            ),
            evidence={
                "matrices": len(found),
                "of": matrices,
                "group": first.group,
                "along": first.along,
                "distinct": max(each.distinct for each in found.values()),
            },
            remedy="Use the weights as they were trained: coarser drafts are rejected more often.",
        )
    ]


def _names(found: Iterable[str]) -> str:
    names = list(found)
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
