"""Records what a running engine's drafter computes, and stores it as a file of tensors.

`DraftRecorder` attaches hooks to the drafter of one engine, under either of vLLM's model runners.
No module or class of vLLM is changed, and the hooks are removed when the `with` block ends. The
engine must live in this process, run eagerly and have one request at a time.

`write_texts` and `read_texts` store the records. Importing this module needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from leadout.checkpoints.store import load_tensors
from leadout.engine.child_process import EngineError


@dataclass(frozen=True, slots=True)
class RecordedContext:
    """The context tokens in the drafter's cache, in the order of their positions."""

    positions: Tensor  # [tokens]
    states: Tensor  # [tokens, taps * target hidden size], the input of fc
    features: Tensor  # [tokens, H], after hidden_norm
    keys: list[Tensor]  # per layer [tokens, kv_heads, head_dim], normed and rotated
    values: list[Tensor]  # per layer [tokens, kv_heads, head_dim]


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    """One drafted block; slot 0 is the anchor."""

    anchor: Tensor  # [], position of the anchor
    drafts: Tensor  # [K]
    hidden: list[Tensor]  # after each layer [K + 1, H]
    final: Tensor  # [K + 1, H], normed
    logits: Tensor  # [K, target vocabulary], -inf for tokens outside the draft vocabulary


@dataclass(frozen=True, slots=True)
class RecordedText:
    tokens: Tensor  # [length], prompt and completion
    context: RecordedContext
    blocks: list[RecordedBlock]


def write_texts(texts: Sequence[RecordedText], path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for number, text in enumerate(texts):
        tensors[f"{number}.tokens"] = text.tokens
        tensors |= _named(f"{number}", text.context)
        for place, block in enumerate(text.blocks):
            tensors |= _named(f"{number}.block.{place}", block)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _named(prefix: str, record: RecordedContext | RecordedBlock) -> dict[str, Tensor]:
    """Tensors by the names of their fields; those of a list, one per layer, are numbered."""
    named: dict[str, Tensor] = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if isinstance(value, Tensor):
            named[f"{prefix}.{each.name}"] = value
        else:
            named |= {f"{prefix}.{each.name}.{layer}": part for layer, part in enumerate(value)}
    return named


def read_texts(path: Path) -> list[RecordedText]:
    tensors = load_tensors(path)
    try:
        return [
            RecordedText(
                part["tokens"],
                part.record(RecordedContext),
                [block.record(RecordedBlock) for block in part.numbered("block.")],
            )
            for part in _Names(tensors).numbered("")
        ]
    except KeyError as problem:
        raise EngineError(
            f"{path} lacks the tensor {problem}, so the engine did not finish writing it. Run the "
            "command again."
        ) from None


_Record = TypeVar("_Record", RecordedContext, RecordedBlock)


class _Names(dict[str, Tensor]):
    """Tensors by dotted name."""

    def under(self, prefix: str) -> Self:
        return type(self)(
            {name.removeprefix(prefix): t for name, t in self.items() if name.startswith(prefix)}
        )

    def numbered(self, prefix: str) -> list[Self]:
        inside = self.under(prefix)
        count = len({name.partition(".")[0] for name in inside})
        return [inside.under(f"{number}.") for number in range(count)]

    def record(self, kind: type[_Record]) -> _Record:
        found: dict[str, Any] = {}
        for each in fields(kind):
            layers = self.under(f"{each.name}.")
            listed = [layers[str(number)] for number in range(len(layers))]
            found[each.name] = self.get(each.name, listed)
        return kind(**found)


@dataclass
class _Step:
    """From the target's hidden states to the drafts, in the order of computation."""

    states: Tensor  # [tokens, taps * target hidden size]
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
    """Keeps the first `blocks` steps of a text; `take` returns them and starts the next text."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._steps: list[_Step] = []
        self._in_context = False
        self._norm: Callable[[Tensor], Tensor]

    @contextmanager
    def attached(self, draft_model: Any) -> Iterator[None]:
        """Record from the draft model of one worker, `worker.get_draft_model()`."""
        model = draft_model.model
        with ExitStack() as until_end:
            for hook in (
                model.fc.register_forward_pre_hook(self._begin),
                *(layer.register_forward_hook(self._on_layer) for layer in model.layers),
                draft_model.register_forward_hook(self._on_block, with_kwargs=True),
            ):
                until_end.callback(hook.remove)
            wrapped: list[tuple[Any, str, Callable[..., Any]]] = [
                (model, "precompute_and_store_context_kv", self._wrap_context),
                (draft_model, "compute_logits", self._wrap_logits),
            ]
            for layer in model.layers:
                wrapped.append((layer.self_attn.attn.impl, "do_kv_cache_update", self._wrap_store))
            for owner, name, wrapper in wrapped:
                until_end.enter_context(_wrapping(owner, name, wrapper))
            self._norm = model.hidden_norm
            yield

    def take(self, tokens: list[int]) -> RecordedText:
        """The record of a text, prompt and completion; blocks after its last token are left out."""
        steps, self._steps = self._steps, []
        return RecordedText(
            torch.tensor(tokens),
            _context(steps),
            [_block(step) for step in steps if 0 <= step.anchor < len(tokens)],
        )

    def _begin(self, _module: object, inputs: tuple[Tensor, ...]) -> None:
        if len(self._steps) <= self._blocks:  # one more, never filled, ends the last one
            self._steps.append(_Step(_copied(inputs[0])))

    @property
    def _step(self) -> _Step | None:
        return self._steps[-1] if 0 < len(self._steps) <= self._blocks else None

    def _wrap_context(
        self,
        original: Callable[..., None],
        states: Tensor,
        positions: Tensor,
        slots: Tensor | list[Tensor] | None = None,
    ) -> None:
        step = self._step
        if step is not None and slots is not None:
            step.positions = _copied(positions)
            step.states = step.states[: len(positions)]
            step.slots = _copied(slots if isinstance(slots, Tensor) else slots[0])
            step.features = _copied(self._norm(states))
        self._in_context = step is not None
        original(states, positions, slots)
        self._in_context = False

    def _wrap_store(
        self,
        original: Callable[..., None],
        attention: object,
        keys: Tensor,
        values: Tensor,
        *rest: Any,
    ) -> None:
        step = self._step
        if step is not None and self._in_context:
            step.keys.append(_copied(keys))
            step.values.append(_copied(values))
        original(attention, keys, values, *rest)

    def _on_layer(self, _layer: object, _inputs: object, output: tuple[Tensor, Tensor]) -> None:
        if self._step is not None:
            branch, residual = output  # vLLM adds them in the next norm
            self._step.hidden.append(_copied(branch + residual))

    def _on_block(
        self, _model: object, _inputs: object, given: dict[str, Any], output: Tensor
    ) -> None:
        if self._step is not None:
            self._step.anchor = int(given["positions"][0])
            self._step.final = _copied(output)

    def _wrap_logits(self, original: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        logits = original(hidden)
        if self._step is not None:
            self._step.logits = _copied(logits)
        return logits


@contextmanager
def _wrapping(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Call `wrapper(method, ...)` in place of one object's method."""
    setattr(owner, name, partial(wrapper, getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)  # uncovers the method of the class


def _context(steps: list[_Step]) -> RecordedContext:
    """The context of all steps, without the rejected drafts that vLLM passes beyond the anchor."""
    steps = [step for step in steps if step.anchor >= 0]
    kept = [(step.positions < step.anchor) & (step.slots >= 0) for step in steps]
    places = torch.cat([step.positions[mask] for step, mask in zip(steps, kept, strict=True)])
    order = places.argsort()

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat([part[mask] for part, mask in zip(parts, kept, strict=True)])[order]

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


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
