"""Any causal language model of transformers as a target: logits and hidden states of some layers.

The model is not modified. Forward hooks on the chosen layers, registered for one call, collect
their outputs; the states of other layers are freed as usual. The state of the last layer, too, is
taken before the model's final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from leadout.errors import LeadoutError

# Attributes in which a wrapper may hold its decoder.
_INNER_NAMES = ("language_model", "text_model", "decoder", "model")


class UnsupportedTargetError(LeadoutError):
    """The model, or the requested layers, cannot be used as a target."""


class TargetStep(NamedTuple):
    """The result of one forward pass of the target for tokens [batch, length]."""

    logits: Tensor  # [batch, length or the kept positions, vocab]
    states: Tensor  # [batch, length, taps * hidden_size], taps in the order of layer_ids


class Observation(NamedTuple):
    """What training needs of the target for tokens [batch, length]."""

    states: Tensor  # [batch, length, taps * hidden_size], taps in the order of layer_ids
    final: Tensor  # [batch, length, hidden_size]: what the output head reads


class Target:
    """A target and its tapped layers; layer id i is the output of layer i."""

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        self._model = model
        self._decoder = find_decoder(model)
        self._layers = cast(nn.ModuleList, self._decoder.layers)
        self._embedding = _accessor(model, "get_input_embeddings")
        self._head = _accessor(model, "get_output_embeddings")
        self.layer_ids = tuple(layer_ids)
        self._require_layer_ids()

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, which may be more than the tokenizer has tokens."""
        return self.embedding.shape[0]

    @property
    def embedding(self) -> Tensor:
        """The raw embedding rows [vocab, hidden], without a scale the model may apply to them."""
        return cast(Tensor, self._embedding.weight)

    def head(self, hidden: Tensor) -> Tensor:
        """The output head alone, [..., hidden] to [..., vocab], without a softcap after it."""
        scores: Tensor = self._head(hidden.to(cast(Tensor, self._head.weight).dtype))
        return scores

    def step(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        past: Any = None,
        attention_mask: Tensor | None = None,
        keep_logits: int | Tensor | None = None,
    ) -> TargetStep:
        """Run the model on `input_ids` [batch, length] at `positions` [batch, length].

        `past` is a cache object of transformers; the step extends it. `keep_logits` limits the
        logits to that many last positions, or to the positions in a tensor [kept]; None keeps all.
        """
        if isinstance(keep_logits, int) and keep_logits < 1:
            raise ValueError(f"keep_logits is {keep_logits}; expected at least 1. See `states`.")
        kept = 0 if keep_logits is None else keep_logits  # 0 means all in transformers
        output, states = self._run(
            self._model, input_ids, positions, past, attention_mask, logits_to_keep=kept
        )
        return TargetStep(output.logits, states)

    def states(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        past: Any = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """As `step`, but only the states: the output head is not computed."""
        return self._run(self._decoder, input_ids, positions, past, attention_mask)[1]

    def observe(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Observation:
        """The states, and the last one as normed for the head, without computing the head."""
        output, states = self._run(self._decoder, input_ids, None, None, attention_mask)
        return Observation(states, output.last_hidden_state)

    def _run(
        self,
        module: nn.Module,
        input_ids: Tensor,
        positions: Tensor | None,
        past: Any,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Any, Tensor]:
        with torch.no_grad(), self._tapped() as caught:
            output = module(
                input_ids=input_ids,
                position_ids=positions,
                past_key_values=past,
                attention_mask=attention_mask,
                use_cache=past is not None,
                return_dict=True,
                **options,
            )
        return output, torch.cat([caught[layer_id] for layer_id in self.layer_ids], dim=-1)

    @contextmanager
    def _tapped(self) -> Iterator[dict[int, Tensor]]:
        caught: dict[int, Tensor] = {}
        handles = [
            self._layers[layer_id].register_forward_hook(_keep_in(caught, layer_id))
            for layer_id in self.layer_ids
        ]
        try:
            yield caught
        finally:
            for handle in handles:
                handle.remove()

    def _require_layer_ids(self) -> None:
        ids = self.layer_ids
        if not ids or len(set(ids)) != len(ids) or not all(0 <= i < self.num_layers for i in ids):
            raise UnsupportedTargetError(
                f"target_layer_ids is {list(ids)}; expected different layers from 0 to "
                f"{self.num_layers - 1} of this {type(self._model).__name__}. Check that the "
                "drafter was trained for this target."
            )


def _keep_in(caught: dict[int, Tensor], layer_id: int) -> Callable[..., None]:
    def hook(_layer: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        caught[layer_id] = output if isinstance(output, Tensor) else output[0]

    return hook


def find_decoder(model: nn.Module) -> nn.Module:
    """The module whose `layers` are the decoder layers, possibly inside wrappers."""
    find = getattr(model, "get_decoder", None)
    module: object = model if find is None else find()
    while isinstance(module, nn.Module):
        if isinstance(getattr(module, "layers", None), nn.ModuleList):
            return module
        inner = (getattr(module, name, None) for name in _INNER_NAMES)
        module = next((each for each in inner if each is not None), None)
    raise UnsupportedTargetError(
        f"{type(model).__name__} cannot be a target: its decoder has no module list `layers`, nor "
        f"has its {', '.join(_INNER_NAMES)}."
    )


def _accessor(model: nn.Module, name: str) -> nn.Module:
    module = getattr(model, name, lambda: None)()
    if not isinstance(module, nn.Module):
        raise UnsupportedTargetError(
            f"{type(model).__name__}.{name}() returns {module!r}; expected a module. Load the "
            "model with its language-model head, for example with AutoModelForCausalLM."
        )
    return module
