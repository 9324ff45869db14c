"""The draft model class that vLLM runs for `DFlashDraftModel` checkpoints instead of its own.

A small subclass that works with both of vLLM's model runners. It refuses a pair that does not fit
before building the model, loads weights strictly, and updates the tensors that vLLM derives from
the weights on every load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.platforms import current_platform

from leadout.checkpoints import Checkpoint, CheckpointError
from leadout.checkpoints.errors import Phrase
from leadout.checkpoints.mask_embedding import read_mask_embedding
from leadout.checkpoints.tensors import by_checked_name
from leadout.checkpoints.unsupported import TRAINED_MASK
from leadout.dflash.config import DrafterConfig
from leadout.engine.child_process import EngineError
from leadout.engine.pair import require_fit
from leadout.engine.settings import restore_draft_table
from leadout.engine.staging import ParameterFormat
from leadout.engine.vllm_adapter import (
    DFlashQwen3ForCausalLM,
    DFlashQwen3Model,
    all_layers_share_blocks,
    draft_folder,
    get_forward_context,
    model_runner,
    rms_norm,
)
from leadout.engine.vllm_internals import DRAFT_CLASS, is_usable
from leadout.models import is_left_to_vllm

# Copies of weights that vLLM makes for one fused projection of the context.
_DERIVED = ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights")

# Tokens whose keys and values may be missing while K = 0. A pass over so many is limited by
# computing, no longer by reading weights; more would only make the step that stores them longer.
MAX_DEFERRED = 128


class ContextTokens(NamedTuple):
    """Tokens for the drafter's cache, as the target's step produced them."""

    states: Tensor  # [tokens, taps * target hidden size], the input of fc
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens], in the cache; -1 for none


def _drafts_nothing() -> bool:
    """Whether the blocks of this pass have a single slot, the anchor."""
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict) or not metadata:  # a warm-up run
        return False
    longest = getattr(next(iter(metadata.values())), "max_query_len", None)
    return longest == 1


class LeadoutDFlashModel(DFlashQwen3Model):  # type: ignore[misc]
    """vLLM's DFlash decoder; context keys and values are computed from the current weights."""

    _rope_cos_sin_cache: Tensor  # vLLM's, shared by all layers

    def _build_fused_kv_buffers(self) -> None:
        rotary_table: Tensor | None = getattr(self, "_rope_cos_sin_cache", None)
        super()._build_fused_kv_buffers()
        if self._rope_cos_sin_cache.is_meta and rotary_table is not None:
            # During a weight update vLLM moves tensors that no checkpoint holds to the meta device.
            self._rope_cos_sin_cache = rotary_table

    def _build_context_kv_buffers(self, layers_attn: list[nn.Module], has_bias: bool) -> None:
        """Rebuild the fused context projection after every load.

        On a GPU the copies are updated in place, because a captured graph keeps reading the tensors
        it was recorded with. On a CPU vLLM packs the projections after loading and empties their
        weights, so that a second load has nothing to copy; there the context goes through the
        packed projections themselves.
        """
        before = {name: getattr(self, name, None) for name in _DERIVED}
        super()._build_context_kv_buffers(layers_attn, has_bias)
        if current_platform.is_cpu():
            self._fused_kv_weight = self._fused_kv_bias = None
        for name, kept in before.items():
            fresh = getattr(self, name)
            if kept is not None and fresh is not None:
                kept.copy_(fresh)
                setattr(self, name, kept)

    def _normalize_context_k(self, all_k: Tensor) -> Tensor:
        """Normalize context keys [layers, tokens, kv_heads, head_dim], each layer by its own norm.

        vLLM does so for all layers in one call with stacked weights [layers, head_dim]. Its CPU
        kernel supports a single weight vector only and uses the first layer's for all layers: no
        error, just worse drafts.
        """
        if not current_platform.is_cpu():
            normed: Tensor = super()._normalize_context_k(all_k)
            return normed
        normed = torch.empty_like(all_k)
        for layer, weight in enumerate(self._k_norm_weights):
            rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
        return normed


class LeadoutDFlashForCausalLM(DFlashQwen3ForCausalLM):  # type: ignore[misc]
    """vLLM's DFlash drafter, for a target that it fits and from a complete checkpoint only."""

    model_cls = LeadoutDFlashModel

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        restore_draft_table(vllm_config)  # vLLM captures graphs after it has built the drafter
        self._initial_checkpoint: Checkpoint | None = require_fit(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        has_files = not is_left_to_vllm(self.draft_model_config.model)
        self._folder: Path | None = draft_folder(vllm_config) if has_files else None
        # Of the parameters that a checkpoint's tensors are loaded into.
        self.parameter_formats: dict[str, ParameterFormat] = {}
        # The order of calls in a step is that of the V1 runner. A connector would copy blocks of
        # the cache that are not filled yet. A block that has gone to layers of the target must not
        # be written any more.
        self._may_defer = (
            current_platform.is_cpu()
            and model_runner(vllm_config) == "V1"
            and self.model.use_aux_hidden_state
            and vllm_config.kv_transfer_config is None
            and all_layers_share_blocks(vllm_config)
        )
        self._states: Tensor | None = None  # of this step
        self._deferred: list[ContextTokens] = []

    @property
    def drafter_config(self) -> DrafterConfig:
        """The architecture of the engine's drafter, which stays when the weights are replaced."""
        checkpoint = self._initial_checkpoint
        if checkpoint is None:
            raise EngineError("Leadout does not know the architecture of this drafter.")
        if checkpoint.left_to_vllm:
            raise EngineError(
                f"The drafter in service has {checkpoint.left_to_vllm[0]}, which is left to vLLM, "
                "so its weights cannot be replaced. Restart the server to serve another version."
            )
        return checkpoint.config

    def forward(
        self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Hidden states of the block's slots, [slots, H]; uninitialized if K = 0.

        With K = 0 vLLM still runs the block's anchor through the layers but ignores the result. The
        context's keys and values, which later blocks need, are stored before this pass; on a CPU a
        step with K = 0 may leave them to a later one.
        """
        drafts_nothing = _drafts_nothing()
        if not drafts_nothing or sum(len(each.slots) for each in self._deferred) > MAX_DEFERRED:
            self._store_deferred()
        if drafts_nothing:
            unused: Tensor = self.model.norm.weight.new_empty(
                len(positions), self.config.hidden_size
            )
            return unused
        hidden: Tensor = super().forward(input_ids, positions, inputs_embeds)
        return hidden

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """Features [tokens, H] of the target's states [tokens, taps * target hidden size].

        On a CPU they are computed in `forward`, which knows whether this step drafts: at batch 1 to
        16, a step without drafts would spend most of the drafter's time reading its weights. The
        result is then a placeholder, which vLLM only passes on.
        """
        if not self._may_defer or hidden_states.shape[1:] != (self.model.fc.input_size,):
            features: Tensor = super().combine_hidden_states(hidden_states)
            return features
        self._states = hidden_states
        return hidden_states.new_empty(()).expand(len(hidden_states), self.config.hidden_size)

    def precompute_and_store_context_kv(
        self,
        context_states: Tensor,
        context_positions: Tensor,
        context_slot_mapping: Tensor | list[Tensor | None] | None = None,
    ) -> None:
        states, self._states = self._states, None
        if states is None:
            super().precompute_and_store_context_kv(
                context_states, context_positions, context_slot_mapping
            )
            return
        assert isinstance(context_slot_mapping, Tensor)  # a list is the V2 runner's
        # Positions and slots are in buffers that the next step overwrites.
        self._deferred.append(
            ContextTokens(states, context_positions.clone(), context_slot_mapping.clone())
        )

    def _store_deferred(self) -> None:
        """Store the keys and values of all tokens that are in no cache yet."""
        if not self._deferred:
            return
        tokens = ContextTokens(*map(torch.cat, zip(*self._deferred, strict=True)))
        if len(self._deferred) > 1:
            # A slot occurs again after a rejected draft, or in another request. The last one
            # counts; vLLM's kernel would write them in any order.
            last = {slot: index for index, slot in enumerate(tokens.slots.tolist())}
            chosen = torch.tensor(list(last.values()))
            tokens = ContextTokens(*(each[chosen] for each in tokens))
        self._deferred.clear()
        features = super().combine_hidden_states(tokens.states)
        super().precompute_and_store_context_kv(features, tokens.positions, tokens.slots)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        """Load all tensors of the drafter or none; returns the names of all parameters.

        vLLM's own method returns nothing, which disables vLLM's check for missing weights. That
        remains so for a drafter with features that Leadout leaves to vLLM.
        """
        checkpoint = self._initial_checkpoint
        if checkpoint is None or set(checkpoint.left_to_vllm) - {TRAINED_MASK}:
            super().load_weights(weights)
            return None
        tensors = by_checked_name(weights, checkpoint.config, checkpoint.path)
        own = self._parameters_of(tensors)
        if not self.parameter_formats:
            self.parameter_formats = {name: ParameterFormat.of(each) for name, each in own.items()}
        filled = self._poison(own)
        self.fill(tensors)
        for name, parameter in filled.items():
            if bool(torch.isnan(parameter).any()):
                raise CheckpointError(
                    checkpoint.path,
                    name,
                    Phrase("was not loaded from any tensor"),
                    "every parameter of the engine to be loaded",
                    "Report this: the engine's drafter and Leadout's disagree.",
                )
        # The others are the target's, which vLLM shares once both models are loaded.
        return {name for name, _ in self.named_parameters()}

    def _read_mask_embedding(self) -> Tensor | None:
        """The trained mask embedding, if any, read as data: vLLM would unpickle the file."""
        mask_token_id = self.model.mask_token_id
        if mask_token_id is None or self._folder is None:
            return None
        return read_mask_embedding(self._folder, mask_token_id, self.config.hidden_size)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors that have been checked."""
        super().load_weights(tensors.items())

    def own_tensors(self) -> dict[str, Tensor]:
        """The parameters that a version brings, and vLLM's copies of them."""
        own: dict[str, Tensor] = {
            name: parameter
            for name, parameter in self.named_parameters()
            if name in self.parameter_formats
        }
        for name in _DERIVED:
            derived = getattr(self.model, name)
            if derived is not None:
                own[f"model.{name}"] = derived
        return own

    def own_modules(self) -> dict[str, nn.Module]:
        """The modules with parameters that a version brings."""
        names = {name.rpartition(".")[0] for name in self.parameter_formats}
        return {name: self.get_submodule(name) for name in sorted(names)}

    def _parameters_of(self, tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        """The parameters that these tensors are loaded into, not those that are the target's."""
        shared = {"model.mask_embedding"}
        if "embed_tokens.weight" not in tensors:
            shared.add("model.embed_tokens.weight")
        if "lm_head.weight" not in tensors:
            shared.add("lm_head.weight")
        return {
            name: parameter for name, parameter in self.named_parameters() if name not in shared
        }

    def _poison(self, own: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Fill parameters with NaN, so that one that is not loaded is noticed.

        While vLLM itself updates the weights of a running engine, the parameters have no storage
        here, and vLLM tracks what was loaded.
        """
        filled = {
            name: parameter
            for name, parameter in own.items()
            if parameter.is_floating_point() and not parameter.is_meta
        }
        with torch.no_grad():
            for parameter in filled.values():
                parameter.fill_(torch.nan)
        return filled


def served_class() -> type[Any]:
    """The class above, or vLLM's own if what it overrides has changed."""
    chosen: type[Any] = (
        LeadoutDFlashForCausalLM if is_usable(DRAFT_CLASS) else DFlashQwen3ForCausalLM
    )
    return chosen


# What vLLM's registry of models loads.
ServedDrafter = served_class()
