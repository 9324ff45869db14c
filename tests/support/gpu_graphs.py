"""Which CUDA graphs vLLM's V2 runner captures for a config, and which one it runs for a batch.

The graph managers are vLLM's own, built as its runner builds them, and told that their graphs have
been captured. Used on the platform of `fake_gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

FULL, PIECEWISE, EAGER = "FULL", "PIECEWISE", "NONE"


class Graphs:
    """Graphs of the target and of the drafter."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.config import replace, set_current_vllm_config
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.attention.backend import AttentionCGSupport

        self._config = vllm_config
        self._drafts = vllm_config.num_speculative_tokens
        speculation, attention = vllm_config.speculative_config, vllm_config.attention_config
        target, support = self._attention(vllm_config, vllm_config.model_config)
        self.target_backend: str = target.get_name()
        self.drafter_backend: str | None = None
        compilation = vllm_config.compilation_config
        with set_current_vllm_config(vllm_config):
            # As in GPUModelRunner.initialize_kv_cache of vLLM's V2 runner.
            mode = compilation.resolve_cudagraph_mode_and_sizes(
                support,
                target.get_name(),
                1 + self._drafts,
                use_v2_model_runner=True,
                max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
            )
        self.mode: str = mode.name
        self._target = self._manager(vllm_config, mode)
        self._drafter: Any = None
        if speculation is not None:
            # As in load_dflash_model and DFlashSpeculator.init_cudagraph_manager.
            from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal

            draft = speculation.draft_model_config
            own = replace(
                attention,
                use_non_causal=dflash_has_any_non_causal(draft.hf_config),
                backend=speculation.attention_backend,
            )
            backend, support = self._attention(replace(vllm_config, attention_config=own), draft)
            self.drafter_backend = backend.get_name()
            has_full = (
                mode.decode_mode() == CUDAGraphMode.FULL
                and support.value >= AttentionCGSupport.UNIFORM_BATCH.value
            )
            own_mode = CUDAGraphMode.FULL_DECODE_ONLY if has_full else CUDAGraphMode.NONE
            self._drafter = self._manager(vllm_config, own_mode)

    def dispatch(self, tokens: Sequence[int]) -> str:
        """The graph for a step that only decodes, by the tokens of each request."""
        from vllm.v1.worker.utils import get_uniform_decode_token_count

        count, total, longest = len(tokens), sum(tokens), max(tokens)
        uniform = get_uniform_decode_token_count(count, total, longest, True)
        chosen = self._target.dispatch(count, total, uniform, 0, max_query_len=longest)
        name: str = chosen.cg_mode.name
        return name

    def dispatch_draft(self, requests: int) -> str:
        """The graph of the drafter, which always drafts whole blocks on V2."""
        length = 1 + self._drafts
        chosen = self._drafter.dispatch(requests, requests * length, length, 0)
        name: str = chosen.cg_mode.name
        return name

    def full_graphs(self) -> dict[str, int]:
        """By verified K, the largest number of requests that a full graph takes."""
        found = {}
        for k in range(self._drafts + 1):
            most = self._most_requests(lambda requests, k=k: self.dispatch([1 + k] * requests))
            if most:
                found[str(k)] = most
        return found

    def drafter_full_graphs(self) -> int | None:
        """The largest number of requests for which drafting runs in a full graph."""
        if self._drafter is None:
            return None
        return self._most_requests(self.dispatch_draft)

    def _most_requests(self, dispatch: Callable[[int], str]) -> int:
        """The largest number of requests that are dispatched to a full graph; 0 for none."""
        limit = self._config.scheduler_config.max_num_seqs
        return next((each for each in range(limit, 0, -1) if dispatch(each) == FULL), 0)

    @staticmethod
    def _attention(vllm_config: Any, model: Any) -> tuple[Any, Any]:
        """The attention backend of a model, and which graphs it supports."""
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.selector import get_attn_backend
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        head_size = model.get_head_size()
        with set_current_vllm_config(vllm_config):
            backend = get_attn_backend(head_size, model.dtype, vllm_config.cache_config.cache_dtype)
            spec = FullAttentionSpec(
                block_size=16,
                num_kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
                head_size=head_size,
                dtype=model.dtype,
            )
            builder = backend.get_builder_cls()
            return backend, builder.get_cudagraph_support(vllm_config, spec)

    def _manager(self, vllm_config: Any, mode: Any) -> Any:
        from vllm.distributed import parallel_state
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        # The manager asks for its place in the pipeline; a stage of one is both ends.
        parallel_state._PP = SimpleNamespace(is_first_rank=True, is_last_rank=True)
        manager = CudaGraphManager(
            vllm_config, torch.device("cpu"), mode, decode_query_len=1 + self._drafts
        )
        manager._graphs_captured = manager.needs_capture()
        return manager
