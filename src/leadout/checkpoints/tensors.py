"""A drafter's tensors: the expected names and shapes, those in a file, and whether they are usable.

The expected names and shapes come from a `Drafter` built on the meta device.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from leadout.checkpoints.errors import MISSING, CheckpointError, Phrase
from leadout.checkpoints.store import StoredTensor
from leadout.checkpoints.unsupported import (
    is_served_by_vllm,
    unsupported,
    unsupported_tensor,
)
from leadout.dflash.config import DrafterConfig
from leadout.dflash.drafter import Drafter

DRAFT_TO_TARGET = "d2t"  # draft id i is target id i + d2t[i]
TARGET_TO_DRAFT = "t2d"  # true at the target ids that are in the draft vocabulary
VERIFIER_COPIES = frozenset({"verifier_lm_head.weight", "verifier_norm.weight"})
_WEIGHT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_OTHER_DTYPES = {DRAFT_TO_TARGET: "I64", TARGET_TO_DRAFT: "BOOL"}
_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class Inventory:
    """The tensors of a checkpoint, checked against its config by name, shape and type."""

    drafter: dict[str, StoredTensor]  # by the names of `Drafter`
    target_to_draft: StoredTensor | None
    dtype: torch.dtype  # of most of the weights
    notes: tuple[str, ...]

    @property
    def parameters(self) -> int:
        shapes = (each.shape for name, each in self.drafter.items() if name != DRAFT_TO_TARGET)
        return sum(map(math.prod, shapes))


def by_drafter_name(
    tensors: Iterable[StoredTensor], path: Path, *, as_served: bool = False
) -> tuple[dict[str, StoredTensor], set[str]]:
    """The tensors by their names in `Drafter`, without the prefix that some tools add.

    Also the features of some of them that Leadout does not implement but, `as_served`, vLLM does.
    """
    named: dict[str, StoredTensor] = {}
    left_to_vllm: set[str] = set()
    for tensor in tensors:
        what = unsupported_tensor(tensor.name)
        if what is not None:
            if not (as_served and is_served_by_vllm(what)):
                raise unsupported(path, tensor.name, Phrase("is in the weights"), what)
            left_to_vllm.add(what)
        name = tensor.name.removeprefix(_PREFIX)
        if name in named:
            raise CheckpointError(path, name, Phrase("is stored twice"), "every tensor once")
        named[name] = tensor
    return named, left_to_vllm


def take_inventory(
    named: Mapping[str, StoredTensor],
    config: DrafterConfig,
    path: Path,
    ignorable: frozenset[str] = frozenset(),
) -> Inventory:
    """Check the file's tensors against the config, without loading them."""
    _require_layer_count(named, config, path)
    expected = expected_shapes(config)
    if config.draft_vocab_size is not None and TARGET_TO_DRAFT in named:
        expected[TARGET_TO_DRAFT] = (config.vocab_size,)
    known = {name: tensor for name, tensor in named.items() if name not in ignorable}
    _require_names(known, expected, path)
    for name, tensor in known.items():
        _require_shape(name, tensor.shape, expected[name], path)
        _require_dtype(name, tensor.dtype, path)
    target_to_draft = known.pop(TARGET_TO_DRAFT, None)
    sizes: Counter[torch.dtype] = Counter()
    for name, tensor in known.items():
        if name != DRAFT_TO_TARGET:
            sizes[_WEIGHT_DTYPES[tensor.dtype]] += math.prod(tensor.shape)
    dtype = sizes.most_common(1)[0][0]
    return Inventory(known, target_to_draft, dtype, tuple(_notes(known, sizes, dtype)))


def inventory_left_to_vllm(
    named: Mapping[str, StoredTensor], config: DrafterConfig, path: Path
) -> Inventory:
    """The tensors of a drafter that only vLLM computes: their names and shapes are its own."""
    _require_layer_count(named, config, path)
    if config.draft_vocab_size is not None and DRAFT_TO_TARGET not in named:
        what = "the target ids of a reduced draft vocabulary"
        raise CheckpointError(path, DRAFT_TO_TARGET, MISSING, what, "Download it again.")
    sizes: Counter[torch.dtype] = Counter({torch.bfloat16: 0})
    for tensor in named.values():
        if tensor.dtype in _WEIGHT_DTYPES:
            sizes[_WEIGHT_DTYPES[tensor.dtype]] += math.prod(tensor.shape)
    return Inventory(dict(named), None, sizes.most_common(1)[0][0], ())


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of this drafter's tensors."""
    with torch.device("meta"):
        state = Drafter(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def by_checked_name(
    weights: Iterable[tuple[str, Tensor]], config: DrafterConfig, path: Path
) -> dict[str, Tensor]:
    """Tensors from any source by their names in `Drafter`: complete, valid, and no others."""
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in weights}
    for name in (*VERIFIER_COPIES, TARGET_TO_DRAFT):
        tensors.pop(name, None)
    require_weights(tensors, config, path)
    return tensors


def require_weights(tensors: Mapping[str, Tensor], config: DrafterConfig, path: Path) -> None:
    """Require exactly the tensors of this config, with valid types and values."""
    expected = expected_shapes(config)
    _require_names(tensors, expected, path)
    for name, tensor in tensors.items():
        _require_shape(name, tuple(tensor.shape), expected[name], path)
        allowed = [torch.int64] if name == DRAFT_TO_TARGET else list(_WEIGHT_DTYPES.values())
        if tensor.dtype not in allowed:
            raise CheckpointError(
                path, name, tensor.dtype, f"one of {allowed}", "Convert the tensor first."
            )
        require_finite(name, tensor, path)
    if config.draft_vocab_size is not None:
        require_vocabulary(tensors[DRAFT_TO_TARGET], None, config.vocab_size, path)


def require_finite(name: str, tensor: Tensor, path: Path) -> None:
    # Types of one byte have no infinity, and most devices cannot compare them.
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        return
    if not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise CheckpointError(
            path,
            name,
            Phrase(f"has {bad} of {tensor.numel()} values that are NaN or infinite"),
            "finite values",
            "Download the checkpoint again, or retrain the drafter.",
        )


def require_vocabulary(
    draft_to_target: Tensor, target_to_draft: Tensor | None, vocab_size: int, path: Path
) -> None:
    """Require that draft ids map to distinct target ids and that both tensors agree."""
    targets = torch.arange(len(draft_to_target)) + draft_to_target
    outside = targets[(targets < 0) | (targets >= vocab_size)]
    if len(outside):
        raise CheckpointError(
            path,
            DRAFT_TO_TARGET,
            Phrase(f"contains target id {int(outside[0])}"),
            f"target ids from 0 to {vocab_size - 1}",
        )
    marks = target_marks(draft_to_target, vocab_size)
    if int(marks.sum()) != len(targets):
        raise CheckpointError(
            path,
            DRAFT_TO_TARGET,
            Phrase("maps several draft ids to one target id"),
            "a different target id for every draft id",
        )
    if target_to_draft is not None and not torch.equal(marks, target_to_draft):
        differing = int((marks != target_to_draft).sum())
        raise CheckpointError(
            path,
            TARGET_TO_DRAFT,
            Phrase(f"differs from {DRAFT_TO_TARGET} at {differing} target ids"),
            f"true exactly at the target ids of {DRAFT_TO_TARGET}",
        )


def target_marks(draft_to_target: Tensor, vocab_size: int) -> Tensor:
    """`t2d` computed from `d2t`: [vocab_size], true at the ids that can be drafted."""
    marks = torch.zeros(vocab_size, dtype=torch.bool)
    marks[torch.arange(len(draft_to_target)) + draft_to_target] = True
    return marks


def _require_layer_count(named: Iterable[str], config: DrafterConfig, path: Path) -> None:
    # Checked before a drafter of that many layers is built.
    matched = (re.match(r"layers\.(\d{1,6})\.", name) for name in named)
    layers = 1 + max((int(match[1]) for match in matched if match), default=-1)
    if layers != config.num_layers:
        raise CheckpointError(
            path,
            "num_hidden_layers",
            config.num_layers,
            f"{layers}, the number of layers in the weights",
            "Correct the config, or download the checkpoint again.",
        )


def _require_names(found: Mapping[str, object], expected: Mapping[str, object], path: Path) -> None:
    absent, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if absent:
        expected_all = f"all tensors of the drafter ({len(absent)} missing in total)"
        raise CheckpointError(path, absent[0], MISSING, expected_all)
    if extra:
        raise CheckpointError(
            path,
            extra[0],
            Phrase("is not a tensor of this drafter"),
            f"only tensors of the drafter ({len(extra)} extra in total)",
            "Remove it if you are sure that no reader uses it.",
        )


def _require_shape(
    name: str, found: tuple[int, ...], expected: tuple[int, ...], path: Path
) -> None:
    if found != expected:
        raise CheckpointError(
            path,
            name,
            Phrase(f"has shape {list(found)}"),
            f"shape {list(expected)} according to the config",
            "Config and weights belong to different drafters; download the checkpoint again.",
        )


def _require_dtype(name: str, found: str, path: Path) -> None:
    expected = _OTHER_DTYPES.get(name)
    if expected is not None and found != expected:
        raise CheckpointError(path, name, Phrase(f"has type {found}"), f"type {expected}")
    if expected is None and found not in _WEIGHT_DTYPES:
        raise unsupported(path, name, Phrase(f"has type {found}"), "a quantized drafter")


def _notes(
    tensors: Mapping[str, StoredTensor], sizes: Counter[torch.dtype], dtype: torch.dtype
) -> Iterable[str]:
    if any(tensor.name != name for name, tensor in tensors.items()):
        yield "tensor names start with `model.`, which vLLM cannot load; `leadout convert` drops it"
    if len(sizes) > 1:
        kinds = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in sizes))
        yield f"weights of several types ({kinds})"
    if dtype == torch.float16:
        yield "float16 overflows when target states are fused; load it as bfloat16 or float32"
