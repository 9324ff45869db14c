"""Findings from weight files: incomplete, not finite, constant or quantised weights.

Weights that were rounded to a few levels and stored as ordinary numbers load and run like any
others; only the number of distinct values in a group reveals it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from leadout.checkpoints import Checkpoint, CheckpointError
from leadout.checkpoints.store import read_header, read_tensors
from leadout.checkpoints.tensors import DRAFT_TO_TARGET, TARGET_TO_DRAFT, require_vocabulary
from leadout.files import FileError, read_object
from leadout.findings import Finding, Severity, error, finding, note, warning
from leadout.pairing import TargetFacts

INDEX = "model.safetensors.index.json"
EMBEDDING = "embed_tokens.weight"  # after the prefix of the architecture
_DOWNLOAD_AGAIN = "Download the target again."

MAX_LEVELS = 16  # distinct values of 4-bit weights
# Groups that share a scale. In the smallest, trained weights have about 30 distinct values, even
# as bfloat16.
GROUPS = (128, 64, 32)
SAMPLED_ROWS = 64
MIN_SHARE = 0.99  # of the sampled groups
# Everything passes through these; any other constant tensor disables one branch only.
VITAL = frozenset(
    {"fc.weight", "hidden_norm.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight"}
)
_MAX_NAMES = 3  # in a message


def target_weight_findings(folder: Path, facts: TargetFacts) -> list[Finding]:
    """Whether the target's weight files are complete, from their headers alone."""
    missing = missing_shards(folder)
    if missing:
        message = (
            f"{folder} lacks {len(missing)} of the files that {INDEX} lists, the first of them "
            f"{missing[0]!r}"
        )
        return [error("target-incomplete", message, _DOWNLOAD_AGAIN, missing=len(missing))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        message = f"{folder} has no safetensors files, so its weights were not examined"
        remedy = "Give the folder with the target's weights, if there is one."
        return [note("target-weights-absent", message, remedy)]
    return _header_findings(files, facts)


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) and not missing_shards(folder)


def missing_shards(folder: Path) -> list[str]:
    """Files that the index lists and the folder lacks, if it has any weights at all."""
    if not any(folder.glob("*.safetensors")):
        return []
    try:
        shard_of = read_object(folder / INDEX).get("weight_map")
    except FileError:
        return []  # no index, or not a valid one: the headers show the rest
    names = sorted(set(map(str, shard_of.values()))) if isinstance(shard_of, dict) else []
    return [name for name in names if not os.path.isfile(folder / name)]  # noqa: PTH113 - no errors


def _header_findings(files: list[Path], facts: TargetFacts) -> list[Finding]:
    """Truncated files, and an embedding with another number of rows than the config states."""
    rows = None
    for path in files:
        try:
            for tensor in read_header(path):
                if tensor.name.endswith(EMBEDDING):
                    rows = next(iter(tensor.shape), 0)
        except CheckpointError as problem:
            return [error("target-unreadable", str(problem), _DOWNLOAD_AGAIN)]
    if rows in (None, facts.vocab_size):
        return []
    message = (
        f"the target's {EMBEDDING} has {rows} rows, but vocab_size in its config.json is "
        f"{facts.vocab_size}"
    )
    remedy = "Config and weights belong to different models; download the target again."
    evidence = {"rows": rows, "vocab_size": facts.vocab_size}
    return [warning("target-embedding", message, remedy, **evidence)]


class Coarse(NamedTuple):
    """Groups of a matrix with few distinct values."""

    along: str  # "columns": each group lies within a row
    group: int
    distinct: int


def drafter_weight_findings(checkpoint: Checkpoint) -> list[Finding]:
    """Examine the drafter's weights, one tensor at a time."""
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
            # A norm of zeros blocks everything; any other constant may be its initial value.
            zero_norm = name.endswith("norm.weight") and constant == 0.0
            if constant is not None and (tensor.dim() == 2 or zero_norm):
                dead[name] = constant
            elif tensor.dim() == 2 and (found := coarseness(tensor)) is not None:
                coarse[name] = found
    except CheckpointError as problem:
        message = str(problem).removesuffix(f". {problem.remedy}")
        return [error("drafter-unreadable", message, problem.remedy)]
    return [
        *([_broken(broken)] if broken else []),
        *([_dead(dead)] if dead else []),
        *([_quantised(coarse, matrices)] if coarse else []),
    ]


def constant_of(tensor: Tensor) -> float | None:
    """The value of all elements, if they are equal."""
    low, high = torch.aminmax(tensor)
    return low.item() if bool(low == high) else None


def coarseness(matrix: Tensor) -> Coarse | None:
    """The largest group size at which nearly all groups have at most `MAX_LEVELS` values."""
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
            few = distinct <= MAX_LEVELS
            if few.double().mean() >= MIN_SHARE:
                return Coarse(along, group, int(distinct[few].max()))
    return None


def _require_vocabulary(checkpoint: Checkpoint, draft_to_target: Tensor) -> None:
    marks = checkpoint.tensors.target_to_draft
    loaded = {} if marks is None else dict(read_tensors({TARGET_TO_DRAFT: marks}))
    target_to_draft = loaded.get(TARGET_TO_DRAFT)
    require_vocabulary(
        draft_to_target, target_to_draft, checkpoint.config.vocab_size, checkpoint.path
    )


def _broken(found: dict[str, int]) -> Finding:
    values = sum(found.values())
    message = f"{values} values are NaN or infinite in {_names(found)}"
    remedy = "Download the checkpoint again, or train it again."
    return error("weights-not-finite", message, remedy, values=values, tensors=len(found))


def _dead(found: dict[str, float]) -> Finding:
    values = sorted(set(found.values()))
    return finding(
        Severity.ERROR if VITAL & found.keys() else Severity.WARNING,
        "weights-dead",
        f"all values are {values[0]:g} in {_names(found)}: these weights are not trained, and "
        "nothing passes through them",
        "The training or the export of this drafter failed; use another one.",
        tensors=len(found),
        values=values,
    )


def _quantised(found: dict[str, Coarse], matrices: int) -> Finding:
    first = next(iter(found.values()))
    return warning(
        "weights-quantised",
        f"{len(found)} of {matrices} matrices ({_names(found)}) have at most {first.distinct} "
        f"distinct values in groups of {first.group} {first.along}: they were quantised and then "
        "stored as ordinary numbers, with the rounding error",
        "Use the weights as trained: drafts of rounded weights are rejected more often.",
        matrices=len(found),
        of=matrices,
        group=first.group,
        along=first.along,
        distinct=max(each.distinct for each in found.values()),
    )


def _names(found: Iterable[str]) -> str:
    names = list(found)
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
