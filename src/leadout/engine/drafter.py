"""The draft-model class that vLLM runs in place of its own for `DFlashDraftModel` checkpoints."""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.platforms import current_platform


class LeadoutDFlashModel(DFlashQwen3Model):  # type: ignore[misc]
    """vLLM's DFlash decoder with the keys of the context normed as the drafter was trained."""

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        """Norm the context's keys [layers, tokens, kv_heads, head_dim], each layer by its own norm.

        vLLM norms all layers in one call with stacked weights [layers, head_dim]. Its CPU kernel
        knows a single weight vector only and takes the first layer's for all of them: no error,
        just worse drafts.
        """
        if not current_platform.is_cpu():
            normed: torch.Tensor = super()._normalize_context_k(all_k)
            return normed
        normed = torch.empty_like(all_k)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
        return normed


class LeadoutDFlashForCausalLM(DFlashQwen3ForCausalLM):  # type: ignore[misc]
    """vLLM's DFlash drafter around `LeadoutDFlashModel`."""

    model_cls = LeadoutDFlashModel
