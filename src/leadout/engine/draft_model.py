"""The draft-model class that vLLM runs in place of its own for `DFlashDraftModel` checkpoints.

A small subclass, the same for both of vLLM's model runners. It refuses a pair that does not fit
before it is built, loads strictly, and keeps what vLLM derives from the weights in step with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.platforms import current_platform

from leadout.checkpoints import Checkpoint, CheckpointError
from leadout.checkpoints.errors import Phrase
from leadout.checkpoints.tensors import by_checked_name
from leadout.dflash.config import DrafterConfig
from leadout.engine.pair import require_fit

# Copies that vLLM makes of weights, for one fused projection of the context.
_DERIVED = ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights")


def _drafts_nothing() -> bool:
    """Whether this pass is for blocks of a single slot, the anchor."""
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict) or not metadata:  # a run for warming up
        return False
    longest = getattr(next(iter(metadata.values())), "max_query_len", None)
    return longest == 1


class LeadoutDFlashModel(DFlashQwen3Model):  # type: ignore[misc]
    """vLLM's DFlash decoder; context keys and values come from the weights as they are now."""

    _rope_cos_sin_cache: Tensor  # of vLLM's, shared by all layers

    def _build_fused_kv_buffers(self) -> None:
        rotary_table: Tensor | None = getattr(self, "_rope_cos_sin_cache", None)
        super()._build_fused_kv_buffers()
        if self._rope_cos_sin_cache.is_meta and rotary_table is not None:
            # In the midst of an update vLLM has put aside what no checkpoint holds; it stays as it
            # was.
            self._rope_cos_sin_cache = rotary_table

    def _build_context_kv_buffers(self, layers_attn: list[nn.Module], has_bias: bool) -> None:
        """Derive the fused context projection anew, after every load.

        On a GPU the copies are refreshed in place: a captured graph goes on reading the tensors it
        was recorded with. On a CPU vLLM packs the projections after loading and empties their
        weights, so that there is nothing left to copy at a second load; there the context goes
        through the packed projections themselves.
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
        """Norm the context's keys [layers, tokens, kv_heads, head_dim], each layer by its own norm.

        vLLM norms all layers in one call with stacked weights [layers, head_dim]. Its CPU kernel
        knows a single weight vector only and takes the first layer's for all of them: no error,
        just worse drafts.
        """
        if not current_platform.is_cpu():
            normed: Tensor = super()._normalize_context_k(all_k)
            return normed
        normed = torch.empty_like(all_k)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
        return normed


class LeadoutDFlashForCausalLM(DFlashQwen3ForCausalLM):  # type: ignore[misc]
    """vLLM's DFlash drafter: built only for a target it fits, filled only by a whole checkpoint."""

    model_cls = LeadoutDFlashModel

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        self._checkpoint_of_start: Checkpoint = require_fit(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    @property
    def drafter_config(self) -> DrafterConfig:
        """What is built into the engine, and stays when the weights are replaced."""
        return self._checkpoint_of_start.config

    def forward(
        self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Hidden states of the block's slots, [slots, H]; where nothing is to be drafted, any.

        With K = 0 vLLM still runs the block's anchor through the layers, and then uses nothing of
        it: the context's keys and values, which later blocks need, are stored before this pass.
        """
        if _drafts_nothing():
            unused: Tensor = self.model.norm.weight.new_empty(
                len(positions), self.config.hidden_size
            )
            return unused
        hidden: Tensor = super().forward(input_ids, positions, inputs_embeds)
        return hidden

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load every tensor of the drafter or none; returns the parameters accounted for.

        vLLM's own method returns nothing, which switches off its check for missing weights.
        """
        checkpoint = self._checkpoint_of_start
        tensors = by_checked_name(weights, checkpoint.config, checkpoint.path)
        filled = self._poison(tensors)
        super().load_weights(tensors.items())
        for name, parameter in filled.items():
            if bool(torch.isnan(parameter).any()):
                raise CheckpointError(
                    checkpoint.path,
                    name,
                    Phrase("was not loaded from any tensor"),
                    "every parameter of the engine to be loaded",
                    "Report this: the engine's drafter and Leadout's disagree.",
                )
        # The rest is borrowed from the target once both are loaded.
        return {name for name, _ in self.named_parameters()}

    def _read_mask_embedding(self) -> None:
        """vLLM would unpickle a `mask_embedding.pt`; such a checkpoint is refused at the start."""

    def _poison(self, tensors: dict[str, Tensor]) -> dict[str, nn.Parameter]:
        """Fill the drafter's own parameters with NaN, so that one left out is seen.

        During an update of a running engine the parameters have no storage here, and vLLM itself
        tracks what arrives.
        """
        borrowed = {"model.mask_embedding"}
        if "embed_tokens.weight" not in tensors:
            borrowed.add("model.embed_tokens.weight")
        if "lm_head.weight" not in tensors:
            borrowed.add("lm_head.weight")
        own = {
            name: parameter
            for name, parameter in self.named_parameters()
            if parameter.is_floating_point() and not parameter.is_meta and name not in borrowed
        }
        with torch.no_grad():
            for parameter in own.values():
                parameter.fill_(torch.nan)
        return own
