"""Known causes of rejected drafts, each with changes of the drafter that would undo it.

A hypothesis yields variants of the drafter in which its cause is undone. If a variant accepts more
than the drafter as it is, the cause is found, and the variant's edit is the repair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    edit: str  # what to change, in terms of the checkpoint's fields and tensors
    config: DrafterConfig
    weights: Callable[[Weights], dict[str, Tensor]] | None = None  # None: unchanged
    normed_last_tap: bool = False  # the last tap after the target's final norm
    # The drafter may be as it was trained and still gain: a fault only if the gain is large.
    may_be_intended: bool = False


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What the hypotheses may use besides the drafter."""

    num_layers: int
    rope: Rope | None
    mask_candidates: Sequence[int]  # tokens that could be the mask token
    longest_text: int  # in tokens


def shifted_taps(config: DrafterConfig, target: TargetInfo) -> Iterator[Variant]:
    """The tapped layers are off by one."""
    for shift, cause in ((1, "taps-one-too-low"), (-1, "taps-one-too-high")):
        ids = tuple(i + shift for i in config.target_layer_ids)
        if min(ids) >= 0 and max(ids) < target.num_layers:
            yield Variant(
                cause,
                f"target_layer_ids: {list(config.target_layer_ids)} -> {list(ids)}",
                replace(config, target_layer_ids=ids),
            )


def tap_order(config: DrafterConfig, target: TargetInfo) -> Iterator[Variant]:
    """fc was trained with the taps in another order.

    vLLM concatenates taps by depth, whatever their order in the file.
    """
    taps = len(config.target_layer_ids)
    for order, swapped in _other_orders(taps).items():
        name = "reversed" if swapped is None else f"taps {swapped} and {swapped + 1} swapped"

        def reordered(weights: Weights, order: tuple[int, ...] = order) -> dict[str, Tensor]:
            parts = torch.split(weights["fc.weight"], config.context_size, dim=1)
            return {**weights, "fc.weight": torch.cat([parts[i] for i in order], dim=1)}

        yield Variant("tap-order", f"fc.weight: its {taps} parts {name}", config, reordered)


def causality(config: DrafterConfig, target: TargetInfo) -> Iterator[Variant]:
    """The layers were trained with the other causality."""
    for causal in (False, True):
        layers = tuple(replace(layer, causal=causal) for layer in config.layers)
        if layers != config.layers:
            yield Variant(
                "causality",
                f"causal: {[layer.causal for layer in config.layers]} -> {causal} in all layers",
                replace(config, layers=layers),
            )


def window(config: DrafterConfig, target: TargetInfo) -> Iterator[Variant]:
    """The layers were trained with another attention window."""
    for size in (None, *COMMON_WINDOWS):
        if size is not None and size >= target.longest_text:
            continue  # it would change nothing on these texts
        layers = tuple(LayerAttention(size, layer.causal) for layer in config.layers)
        if layers != config.layers:
            sizes = [layer.window for layer in config.layers]
            yield Variant(
                "window",
                f"sliding_window: {sizes} -> {size} in all layers",
                replace(config, layers=layers),
                # A drafter trained on short texts may gain from a window on long ones.
                may_be_intended=size is not None
                and all(now is None or now >= target.longest_text for now in sizes),
            )


def rope(config: DrafterConfig, target: TargetInfo) -> Iterator[Variant]:
    """The drafter was trained with another rotary embedding."""
    candidates = [] if target.rope is None else [target.rope]
    candidates += [replace(config.rope, theta=theta) for theta in COMMON_THETAS]
    candidates += [replace(config.rope, fraction=share) for share in COMMON_FRACTIONS]
    if config.rope.scaling is not None:
        candidates.append(replace(config.rope, scaling=None))
    seen = {config.rope}
    for candidate in candidates:
        rotated = config.head_dim * candidate.fraction
        if candidate in seen or rotated % 2:
            continue
        seen.add(candidate)
        cause = "rope-theta" if candidate.theta != config.rope.theta else "rope-fraction"
        if candidate.scaling != config.rope.scaling:
            cause = "rope-scaling"
        yield Variant(
            cause,
            f"rope: {_describe_rope(config.rope)} -> {_describe_rope(candidate)}",
            replace(config, rope=candidate),
        )


def mask_token(config: DrafterConfig, target: TargetInfo) -> Iterator[Variant]:
    """The drafter was trained with another mask token."""
    for token in target.mask_candidates:
        if token != config.mask_token_id and token < config.vocab_size:
            yield Variant(
                "mask-token",
                f"mask_token_id: {config.mask_token_id} -> {token}",
                replace(config, mask_token_id=token),
            )


def layer_order(config: DrafterConfig, target: TargetInfo) -> Iterator[Variant]:
    """The draft layers are in another order than in training."""
    for order in sorted(_other_orders(config.num_layers)):

        def reordered(weights: Weights, order: tuple[int, ...] = order) -> dict[str, Tensor]:
            changed = dict(weights)
            for place, source in enumerate(order):
                prefix = f"layers.{source}."
                for name in weights:
                    if name.startswith(prefix):
                        changed[f"layers.{place}.{name.removeprefix(prefix)}"] = weights[name]
            return changed

        yield Variant("layer-order", f"layers: in the order {list(order)}", config, reordered)


def _other_orders(count: int) -> dict[tuple[int, ...], int | None]:
    """Reversed, and every two neighbours swapped: each order with the first of the two places."""
    if count < 2:
        return {}
    orders: dict[tuple[int, ...], int | None] = {tuple(reversed(range(count))): None}
    for place in range(count - 1):
        before, after = range(place), range(place + 2, count)
        orders.setdefault((*before, place + 1, place, *after), place)
    return orders


def last_norm(config: DrafterConfig, target: TargetInfo) -> Iterator[Variant]:
    """The drafter was trained on the last tap after the target's final norm."""
    if config.target_layer_ids[-1] == target.num_layers - 1:
        yield Variant(
            "last-layer-norm",
            "the last tap: the target's last state after its final norm",
            config,
            normed_last_tap=True,
        )


def variants_of(config: DrafterConfig, target: TargetInfo) -> list[Variant]:
    """The variants of all hypotheses for one drafter."""
    known = (shifted_taps, tap_order, causality, window, rope, mask_token, layer_order, last_norm)
    return [variant for each in known for variant in each(config, target)]


def _describe_rope(value: Rope) -> str:
    scaling = "" if value.scaling is None else f", {type(value.scaling).__name__}"
    share = "" if value.fraction == 1.0 else f", {value.fraction:g} of a head"
    return f"theta {value.theta:g}{share}{scaling}"
