"""Known causes of rejected drafts, each as a change that would undo it.

Every cause is one entry: a name, what it would mean, and variants of the drafter in which it is
undone. A variant that accepts more than the drafter as it is names the cause, and its edit is the
repair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leadout.dflash.config import DrafterConfig, LayerAttention, Rope

Weights = Mapping[str, Tensor]
COMMON_THETAS = (1e4, 1e5, 5e5, 1e6, 1e7)
COMMON_FRACTIONS = (1.0, 0.5, 0.25)
COMMON_WINDOWS = (512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Variant:
    """The drafter with one thing changed."""

    cause: str
    edit: str  # what to change, in the words of the file
    config: DrafterConfig
    weights: Callable[[Weights], dict[str, Tensor]] | None = None  # None: as they are
    normed_last_tap: bool = False  # the last layer's state as the target's head reads it
    # The drafter may be as it was trained and still gain by this: no fault unless it gains much.
    may_be_meant: bool = False


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the hypotheses may know besides the drafter."""

    target_layers: int
    target_rope: Rope | None
    special_tokens: Sequence[int]  # that could be the mask token
    longest_context: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    name: str
    means: str
    variants: Callable[[DrafterConfig, Surroundings], Iterable[Variant]]


def shifted_taps(config: DrafterConfig, around: Surroundings) -> Iterator[Variant]:
    for shift, cause in ((1, "taps-one-too-low"), (-1, "taps-one-too-high")):
        ids = tuple(i + shift for i in config.target_layer_ids)
        if min(ids) >= 0 and max(ids) < around.target_layers:
            yield Variant(
                cause,
                f"target_layer_ids: {list(config.target_layer_ids)} -> {list(ids)}",
                replace(config, target_layer_ids=ids),
            )


def order_of_taps(config: DrafterConfig, around: Surroundings) -> Iterator[Variant]:
    """vLLM concatenates by depth, whatever the file's order; fc must be in that order too."""
    taps = len(config.target_layer_ids)
    if taps < 2:
        return
    width = config.context_size
    orders = {"reversed": list(reversed(range(taps)))}
    for place in range(taps - 1):
        swapped = list(range(taps))
        swapped[place], swapped[place + 1] = swapped[place + 1], swapped[place]
        orders[f"taps {place} and {place + 1} swapped"] = swapped
    for name, order in orders.items():
        if name == "taps 0 and 1 swapped" and taps == 2:
            continue  # the same as reversed

        def reordered(weights: Weights, order: list[int] = order) -> dict[str, Tensor]:
            parts = torch.split(weights["fc.weight"], width, dim=1)
            return {**weights, "fc.weight": torch.cat([parts[i] for i in order], dim=1)}

        yield Variant("tap-order", f"fc.weight: its {taps} parts {name}", config, reordered)


def causality(config: DrafterConfig, around: Surroundings) -> Iterator[Variant]:
    for causal in (False, True):
        layers = tuple(replace(layer, causal=causal) for layer in config.layers)
        if layers != config.layers:
            yield Variant(
                "causality",
                f"causal: {[layer.causal for layer in config.layers]} -> {causal} in all layers",
                replace(config, layers=layers),
            )


def window(config: DrafterConfig, around: Surroundings) -> Iterator[Variant]:
    for size in (None, *COMMON_WINDOWS):
        if size is not None and size >= around.longest_context:
            continue  # it would change nothing here
        layers = tuple(LayerAttention(size, layer.causal) for layer in config.layers)
        if layers != config.layers:
            sizes = [layer.window for layer in config.layers]
            yield Variant(
                "window",
                f"sliding_window: {sizes} -> {size} in all layers",
                replace(config, layers=layers),
                # A drafter of short texts gains by a window at long ones, and has lost none.
                may_be_meant=size is not None
                and all(now is None or now >= around.longest_context for now in sizes),
            )


def rope(config: DrafterConfig, around: Surroundings) -> Iterator[Variant]:
    tried = [] if around.target_rope is None else [around.target_rope]
    tried += [replace(config.rope, theta=theta) for theta in COMMON_THETAS]
    tried += [replace(config.rope, fraction=share) for share in COMMON_FRACTIONS]
    if config.rope.scaling is not None:
        tried.append(replace(config.rope, scaling=None))
    seen = {config.rope}
    for candidate in tried:
        rotated = config.head_dim * candidate.fraction
        if candidate in seen or rotated % 2:
            continue
        seen.add(candidate)
        cause = "rope-theta" if candidate.theta != config.rope.theta else "rope-fraction"
        if candidate.scaling != config.rope.scaling:
            cause = "rope-scaling"
        yield Variant(
            cause,
            f"rope: {_rope(config.rope)} -> {_rope(candidate)}",
            replace(config, rope=candidate),
        )


def mask_token(config: DrafterConfig, around: Surroundings) -> Iterator[Variant]:
    for token in around.special_tokens:
        if token != config.mask_token_id and token < config.vocab_size:
            yield Variant(
                "mask-token",
                f"mask_token_id: {config.mask_token_id} -> {token}",
                replace(config, mask_token_id=token),
            )


def layer_order(config: DrafterConfig, around: Surroundings) -> Iterator[Variant]:
    count = config.num_layers
    orders = {tuple(reversed(range(count)))} if count > 1 else set()
    for place in range(count - 1):
        swapped = list(range(count))
        swapped[place], swapped[place + 1] = swapped[place + 1], swapped[place]
        orders.add(tuple(swapped))
    for order in sorted(orders):

        def reordered(weights: Weights, order: tuple[int, ...] = order) -> dict[str, Tensor]:
            changed = dict(weights)
            for place, source in enumerate(order):
                prefix = f"layers.{source}."
                for name in weights:
                    if name.startswith(prefix):
                        changed[f"layers.{place}.{name.removeprefix(prefix)}"] = weights[name]
            return changed

        yield Variant("layer-order", f"layers: taken in the order {list(order)}", config, reordered)


def last_norm(config: DrafterConfig, around: Surroundings) -> Iterator[Variant]:
    if config.target_layer_ids[-1] == around.target_layers - 1:
        yield Variant(
            "last-layer-norm",
            "the last tap: the target's last state after its final norm",
            config,
            normed_last_tap=True,
        )


HYPOTHESES: tuple[Hypothesis, ...] = (
    Hypothesis("taps", "the tapped layers are off by one", shifted_taps),
    Hypothesis("tap-order", "fc was trained with the taps in another order", order_of_taps),
    Hypothesis("causality", "the layers were trained with the other causality", causality),
    Hypothesis("window", "the layers were trained with another attention window", window),
    Hypothesis("rope", "the drafter rotates positions otherwise than it was trained", rope),
    Hypothesis("mask-token", "empty slots hold another token than in training", mask_token),
    Hypothesis("layer-order", "the draft layers are not in their order of training", layer_order),
    Hypothesis("last-norm", "the last tap was taken after the target's final norm", last_norm),
)


def _rope(value: Rope) -> str:
    scaling = "" if value.scaling is None else f", {type(value.scaling).__name__}"
    share = "" if value.fraction == 1.0 else f", {value.fraction:g} of a head"
    return f"theta {value.theta:g}{share}{scaling}"
