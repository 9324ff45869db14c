"""What an engine's drafter computed for a few texts, as a file of tensors. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecordedContext:
    """Of the tokens that the drafter has taken into its cache, in the order of their positions."""

    positions: Tensor  # [tokens]
    states: Tensor  # [tokens, taps * target width], what fc reads
    features: Tensor  # [tokens, H], after hidden_norm
    keys: list[Tensor]  # of each layer [tokens, kv_heads, head_dim], normed and rotated
    values: list[Tensor]  # of each layer [tokens, kv_heads, head_dim]


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    """One block of drafts after the anchor; slot 0 is the anchor's."""

    anchor: Tensor  # [], its position
    drafts: Tensor  # [K]
    hidden: list[Tensor]  # after each layer [K + 1, H]
    final: Tensor  # [K + 1, H], normed
    logits: Tensor  # [K, target vocabulary], minus infinity where the drafter has no token


@dataclass(frozen=True, slots=True)
class RecordedText:
    tokens: Tensor  # [length], prompt and answer
    context: RecordedContext
    blocks: list[RecordedBlock]


def write_texts(texts: Sequence[RecordedText], path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for number, text in enumerate(texts):
        context = text.context
        tensors[f"{number}.tokens"] = text.tokens
        for name in ("positions", "states", "features"):
            tensors[f"{number}.{name}"] = getattr(context, name)
        for layer, (keys, values) in enumerate(zip(context.keys, context.values, strict=True)):
            tensors[f"{number}.keys.{layer}"] = keys
            tensors[f"{number}.values.{layer}"] = values
        for place, block in enumerate(text.blocks):
            prefix = f"{number}.block.{place}"
            for name in ("anchor", "drafts", "final", "logits"):
                tensors[f"{prefix}.{name}"] = getattr(block, name)
            for layer, hidden in enumerate(block.hidden):
                tensors[f"{prefix}.hidden.{layer}"] = hidden
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def read_texts(path: Path) -> list[RecordedText]:
    whole = _Names(load_file(path))
    return [_text(part) for part in whole.numbered("")]


def _text(part: _Names) -> RecordedText:
    return RecordedText(
        tokens=part["tokens"],
        context=RecordedContext(
            part["positions"],
            part["states"],
            part["features"],
            part.listed("keys"),
            part.listed("values"),
        ),
        blocks=[
            RecordedBlock(
                block["anchor"],
                block["drafts"],
                block.listed("hidden"),
                block["final"],
                block["logits"],
            )
            for block in part.numbered("block.")
        ],
    )


class _Names(dict[str, Tensor]):
    """Tensors by dotted names."""

    def under(self, prefix: str) -> Self:
        return type(self)(
            {name.removeprefix(prefix): t for name, t in self.items() if name.startswith(prefix)}
        )

    def numbered(self, prefix: str) -> list[Self]:
        inside = self.under(prefix)
        count = len({name.partition(".")[0] for name in inside})
        return [inside.under(f"{number}.") for number in range(count)]

    def listed(self, name: str) -> list[Tensor]:
        inside = self.under(f"{name}.")
        return [inside[str(number)] for number in range(len(inside))]


# Listens to one engine's drafter: what it keeps of the context and what it makes of a block.
#
# It hears what passes through this engine's own objects, under both of vLLM's model runners. No
# module or class of vLLM is changed, and the engine is as it was when the `with` block ends. The
# engine must live in this process, run eagerly and have one request under way.


@dataclass
class _Step:
    """From the target's states to the drafts, in the order in which it is heard."""

    states: Tensor  # [tokens, taps * target width]
    positions: Tensor = field(default_factory=lambda: torch.empty(0))  # [tokens]
    slots: Tensor = field(default_factory=lambda: torch.empty(0))  # [tokens], in the cache
    features: Tensor = field(default_factory=lambda: torch.empty(0))  # [tokens, H]
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    anchor: int = -1
    final: Tensor = field(default_factory=lambda: torch.empty(0))
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


class DraftRecorder:
    """Keeps the first steps that it hears; `take` makes a text of them and starts anew."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._steps: list[_Step] = []
        self._hears_context = False
        self._norm: Callable[[Tensor], Tensor]

    @contextmanager
    def listening(self, draft_model: Any) -> Iterator[None]:
        """To the draft model of one worker, `worker.get_draft_model()`."""
        model = draft_model.model
        with ExitStack() as until_end:
            for hook in (
                model.fc.register_forward_pre_hook(self._begin),
                *(layer.register_forward_hook(self._hear_layer) for layer in model.layers),
                draft_model.register_forward_hook(self._hear_block, with_kwargs=True),
            ):
                until_end.callback(hook.remove)
            heard: list[tuple[Any, str, Callable[..., Any]]] = [
                (draft_model, "precompute_and_store_context_kv", self._around_context),
                (draft_model, "compute_logits", self._around_logits),
            ]
            for layer in model.layers:
                heard.append((layer.self_attn.attn.impl, "do_kv_cache_update", self._around_store))
            for owner, name, around in heard:
                until_end.enter_context(_around(owner, name, around))
            self._norm = model.hidden_norm
            yield

    def take(self, tokens: list[int]) -> RecordedText:
        """The text that was heard, prompt and answer; drafts past its end are left out."""
        steps, self._steps = self._steps, []
        return RecordedText(
            torch.tensor(tokens),
            _context(steps),
            [_block(step) for step in steps if 0 <= step.anchor < len(tokens)],
        )

    def _begin(self, _module: object, inputs: tuple[Tensor, ...]) -> None:
        if len(self._steps) <= self._blocks:  # one more, which is never filled, ends the last
            self._steps.append(_Step(_kept(inputs[0])))

    @property
    def _step(self) -> _Step | None:
        return self._steps[-1] if 0 < len(self._steps) <= self._blocks else None

    def _around_context(
        self,
        original: Callable[..., None],
        states: Tensor,
        positions: Tensor,
        slots: Tensor | list[Tensor] | None = None,
    ) -> None:
        step = self._step
        if step is not None and slots is not None:
            step.positions = _kept(positions)
            step.states = step.states[: len(positions)]
            step.slots = _kept(slots if isinstance(slots, Tensor) else slots[0])
            step.features = _kept(self._norm(states))
        self._hears_context = step is not None
        original(states, positions, slots)
        self._hears_context = False

    def _around_store(
        self,
        original: Callable[..., None],
        attention: object,
        keys: Tensor,
        values: Tensor,
        *rest: Any,
    ) -> None:
        step = self._step
        if step is not None and self._hears_context:
            step.keys.append(_kept(keys))
            step.values.append(_kept(values))
        original(attention, keys, values, *rest)

    def _hear_layer(self, _layer: object, _inputs: object, output: tuple[Tensor, Tensor]) -> None:
        if self._step is not None:
            branch, residual = output  # vLLM adds them in the next norm
            self._step.hidden.append(_kept(branch + residual))

    def _hear_block(
        self, _model: object, _inputs: object, given: dict[str, Any], output: Tensor
    ) -> None:
        if self._step is not None:
            self._step.anchor = int(given["positions"][0])
            self._step.final = _kept(output)

    def _around_logits(self, original: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        logits = original(hidden)
        if self._step is not None:
            self._step.logits = _kept(logits)
        return logits


@contextmanager
def _around(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Calls of this one object's method go through `around`, which is given the method first."""
    setattr(owner, name, partial(around, getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)  # the class's method is seen again


def _context(steps: list[_Step]) -> RecordedContext:
    """Of all steps, what stays: rejected drafts are passed along too, beyond the anchor."""
    steps = [step for step in steps if step.anchor >= 0]
    stays = [(step.positions < step.anchor) & (step.slots >= 0) for step in steps]
    places = torch.cat([step.positions[stay] for step, stay in zip(steps, stays, strict=True)])
    order = places.argsort()

    def joined(parts: list[Tensor]) -> Tensor:
        kept = [part[stay] for part, stay in zip(parts, stays, strict=True)]
        return torch.cat(kept)[order]

    layers = range(len(steps[0].keys))
    return RecordedContext(
        places[order],
        joined([step.states for step in steps]),
        joined([step.features for step in steps]),
        [joined([step.keys[layer] for step in steps]) for layer in layers],
        [joined([step.values[layer] for step in steps]) for layer in layers],
    )


def _block(step: _Step) -> RecordedBlock:
    count = len(step.logits)
    return RecordedBlock(
        torch.tensor(step.anchor),
        step.logits.argmax(dim=-1),
        [hidden[: count + 1] for hidden in step.hidden],
        step.final[: count + 1],
        step.logits,
    )


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
