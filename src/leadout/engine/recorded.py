"""What an engine's drafter computed for a few texts, as a file of tensors. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

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
