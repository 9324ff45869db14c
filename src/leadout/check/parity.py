"""Whether the engine computes the same drafts as the reference, and which tensor differs first.

A few blocks are compared in two ways. The drafts are compared end to end: the engine's with those
of the reference after its own target. The tensors are compared stage by stage: the target's states
with those of the reference, and everything after them with a reference drafter that is given the
engine's target states, so that the rounding of a deep target does not mask the drafter's part.

A difference is the distance between two rows, of one token or slot, relative to the norm of the
reference's row: the huge values of a few tokens hide nothing in the others. Of the drafter's
tensors the worst row counts. Of the target's states the mean counts, because a deep target
magnifies the rounding of single tokens tenfold, while a wrong layer shows in every token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leadout.check.result import Parity
from leadout.checkpoints import load_drafter
from leadout.dflash.config import DrafterConfig
from leadout.dflash.drafter import Drafter, KeyValue
from leadout.dflash.mask import decode_masks
from leadout.engine.draft_recorder import RecordedText
from leadout.evaluate.blocks import TrainingSequence
from leadout.evaluate.hidden_states import ReferenceTarget, as_reference
from leadout.evaluate.target_weights import TargetFiles, TargetWeights, load_target_weights
from leadout.findings import Finding, Severity, finding

Tensors = dict[str, Tensor]  # each with one row per token or slot
FEATURES, FINAL, LOGITS = "context features", "final hidden states", "logits"

MAX_DISTANCE = 1e6  # also the distance of NaN

# float32: allows for a deep target's sums in another order, far below the effect of a wrong weight.
FLOAT32_TOLERANCE = 1e-4
# Lower precision, the drafter: two ways to compute a tensor are about equally far from the exact
# one, so more than this multiple of the reference's distance is not rounding.
DRAFTER_SPREAD = 4.0
# Lower precision, the target's states: every layer adds a rounding of up to half an eps to the
# residual and as much in what it computes; independent errors grow with the root of their number.
# This is twice that sum.
STATES_SPREAD = 2.0
# Drafts from equal tensors differ only at ties, which are few.
MIN_EQUAL_SHARE = 0.75
# Below this share the drafts are those of another drafter.
UNFIT_EQUAL_SHARE = 0.5


def state_name(layer_id: int) -> str:
    return f"target layer {layer_id} states"


def keys_name(layer: int) -> str:
    return f"layer {layer} context keys"


def values_name(layer: int) -> str:
    return f"layer {layer} context values"


def hidden_name(layer: int) -> str:
    return f"layer {layer} block hidden states"


def names_in_order(config: DrafterConfig) -> list[str]:
    """The compared tensors in the order in which they are computed."""
    return [
        *(state_name(layer_id) for layer_id in config.target_layer_ids),
        FEATURES,
        *(
            name(layer)
            for layer in range(config.num_layers)
            for name in (keys_name, values_name, hidden_name)
        ),
        FINAL,
        LOGITS,
    ]


class Reference:
    """A drafter that has read the target's states [length, taps * width] of one text."""

    def __init__(self, drafter: Drafter, weights: TargetWeights, states: Tensor) -> None:
        self._drafter = drafter
        self._weights = weights
        self._positions = torch.arange(len(states))[None]
        with torch.no_grad():
            self._features = drafter.context_features(states[None])  # [1, length, H]
            self._context = drafter.context_kv(self._features, self._positions)

    def context(self, positions: Tensor) -> Tensors:
        """The drafter's context tensors of the tokens at these positions."""
        tensors = {FEATURES: self._features[0, positions]}
        for layer, kept in enumerate(self._context):
            tensors[keys_name(layer)] = kept.keys[0].transpose(0, 1)[positions]
            tensors[values_name(layer)] = kept.values[0].transpose(0, 1)[positions]
        return tensors

    @torch.no_grad()
    def block(self, anchor: int, token: int, count: int) -> Tensors:
        """The tensors of a block of `count` drafts after the anchor `token` at this position."""
        drafter = self._drafter
        positions = torch.arange(anchor, anchor + count + 1)[None]
        before = self._positions[:, :anchor]
        masks = decode_masks(
            drafter.config.layers, positions, before, torch.ones_like(before, dtype=torch.bool)
        )
        block = drafter.block_tokens(torch.tensor([token]), count + 1)
        with _layer_outputs(drafter) as hidden:
            final = drafter(
                drafter.embed(block, self._weights.embedding),
                positions,
                [KeyValue(*(part[:, :, :anchor] for part in kept)) for kept in self._context],
                masks,
            )
        return {
            **{hidden_name(layer): states[0] for layer, states in enumerate(hidden)},
            FINAL: final[0, 1:],  # nothing is drafted from the anchor's slot
            LOGITS: drafter.logits(final[0, 1:], self._head),
        }

    def _head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._weights.head.to(hidden.dtype))


@contextmanager
def _layer_outputs(drafter: Drafter) -> Iterator[list[Tensor]]:
    """Collects the output of every draft layer, in order."""
    outputs: list[Tensor] = []

    def keep(_layer: nn.Module, _inputs: object, output: Tensor) -> None:
        outputs.append(output)

    hook: Callable[..., None] = keep
    handles = [layer.register_forward_hook(hook) for layer in drafter.layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def compare(
    target: Path,
    drafter: Path,
    model: nn.Module | ReferenceTarget,
    recorded: Sequence[RecordedText],
    precision: torch.dtype,
    rounding: torch.dtype,
) -> Parity:
    """Compare what the engine recorded with the reference.

    `model` is the target; engine and model run in this precision. `rounding` is the type whose
    rounding explains differences between the target's states.
    """
    rounded = _ReferencePair(target, drafter, precision)
    exact = _ReferencePair(target, drafter, torch.float32)
    config = exact.drafter.config
    taps = config.target_layer_ids
    source = as_reference(model).source(taps)
    differences, noise = _Largest(), _Largest()
    blocks = drafts = equal = 0
    for number, text in enumerate(recorded):
        item = (number, TrainingSequence(str(number), "recorded", text.tokens, 1))
        own_states = source.observe([item]).states[0].cpu()  # [length, taps * width]
        recorded_at = text.context.positions
        of_engine = _by_tap(text.context.states, taps)
        for name, part in _by_tap(own_states[recorded_at], taps).items():
            differences.add(name, float(distances(of_engine[name], part).mean()))
        states = own_states.clone()
        states[recorded_at] = text.context.states
        expected = list(exact.tensors(text, states))
        noise.compare(rounded.tensors(text, states), expected)
        differences.compare(_of_engine(text, exact.drafter), expected)
        for block, own_drafts in zip(text.blocks, rounded.drafts(text, own_states), strict=True):
            blocks += 1
            drafts += len(block.drafts)
            equal += int((own_drafts == block.drafts).sum())
    found = {name: differences.found[name] for name in names_in_order(config)}
    allowed = {
        **{state_name(layer): allowed_in_states(layer, rounding) for layer in taps},
        **{name: allowed_in_drafter(worst, precision) for name, worst in noise.found.items()},
    }
    return Parity(
        blocks=blocks,
        drafts=drafts,
        equal_drafts=equal,
        first_difference=next((name for name in found if found[name] > allowed[name]), None),
        differences=found,
        allowed={name: allowed[name] for name in found},
    )


def allowed_in_states(layer_id: int, rounding: torch.dtype) -> float:
    if rounding == torch.float32:
        return FLOAT32_TOLERANCE
    return STATES_SPREAD * torch.finfo(rounding).eps * math.sqrt(layer_id + 1)


def allowed_in_drafter(noise: float, precision: torch.dtype) -> float:
    """`noise` is how far the reference itself is from the exact tensor in this precision."""
    if precision == torch.float32:
        return FLOAT32_TOLERANCE
    return max(DRAFTER_SPREAD * noise, torch.finfo(precision).eps)


def finding_of(parity: Parity) -> Finding | None:
    share = parity.equal_drafts / max(parity.drafts, 1)
    name = parity.first_difference
    if name is None and share >= MIN_EQUAL_SHARE:
        return None
    if name is None:
        cause = "all tensors agree, but the tokens chosen from the logits differ"
    else:
        cause = (
            f"the first tensor that differs is {name}: by {parity.differences[name]:.2g} of its "
            f"norm, where rounding explains {parity.allowed[name]:.2g}"
        )
    return finding(
        Severity.ERROR if share < UNFIT_EQUAL_SHARE else Severity.WARNING,
        "engine-parity",
        f"vLLM computes other drafts than the reference: {parity.equal_drafts} of {parity.drafts} "
        f"drafts are equal, and {cause}",
        "Serve with Leadout's drafter class (LEADOUT_PLUGIN not 0) on a supported vLLM. If you "
        "already do, report this result: the engine does not compute the drafter that was trained.",
        equal_drafts=parity.equal_drafts,
        drafts=parity.drafts,
        first_difference=name or "drafts",
    )


class _ReferencePair:
    """The reference drafter and the target's weights in one precision."""

    def __init__(self, target: Path, drafter: Path, precision: torch.dtype) -> None:
        self.drafter = load_drafter(drafter, precision)
        self._weights = load_target_weights(TargetFiles(target), precision, torch.device("cpu"))

    def tensors(self, text: RecordedText, states: Tensor) -> Iterator[Tensors]:
        """The tensors of the context, then those of each block."""
        reference = Reference(self.drafter, self._weights, states)
        yield reference.context(text.context.positions)
        for block in text.blocks:
            anchor = int(block.anchor)
            yield reference.block(anchor, int(text.tokens[anchor]), len(block.drafts))

    def drafts(self, text: RecordedText, states: Tensor) -> Iterator[Tensor]:
        _, *blocks = self.tensors(text, states)
        for tensors in blocks:
            yield self.drafter.to_target_ids(tensors[LOGITS].argmax(dim=-1))


def _of_engine(text: RecordedText, drafter: Drafter) -> Iterator[Tensors]:
    """What the engine recorded, under the same names and in the same order."""
    context = text.context
    tensors = {FEATURES: context.features}
    for layer, (keys, values) in enumerate(zip(context.keys, context.values, strict=True)):
        tensors |= {keys_name(layer): keys, values_name(layer): values}
    yield tensors
    own_tokens = drafter.to_target_ids(torch.arange(drafter.config.head_rows))
    for block in text.blocks:
        yield {
            **{hidden_name(layer): hidden for layer, hidden in enumerate(block.hidden)},
            FINAL: block.final[1:],
            LOGITS: block.logits[:, own_tokens],
        }


def _by_tap(states: Tensor, layer_ids: Sequence[int]) -> Tensors:
    parts = torch.chunk(states, len(layer_ids), dim=-1)
    return {state_name(i): part for i, part in zip(layer_ids, parts, strict=True)}


class _Largest:
    """The largest difference of each tensor so far."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def compare(self, parts: Iterable[Tensors], expected: Iterable[Tensors]) -> None:
        for tensors, references in zip(parts, expected, strict=True):
            for name, reference in references.items():
                self.add(name, float(distances(tensors[name], reference).max()))

    def add(self, name: str, difference: float) -> None:
        self.found[name] = max(difference, self.found.get(name, 0.0))


def distances(tensor: Tensor, reference: Tensor) -> Tensor:
    """Distances [rows] between the rows of two tensors [rows, ...], relative to the reference's."""
    rows = reference.float().flatten(1)
    distance = (tensor.float().flatten(1) - rows).norm(dim=1)
    relative: Tensor = distance / rows.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return relative.nan_to_num(nan=MAX_DISTANCE).clamp(max=MAX_DISTANCE)
