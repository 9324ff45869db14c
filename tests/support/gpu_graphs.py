"""Which CUDA graphs vLLM's V2 runner captures for a config, and which one it runs for a batch.

The graph managers are vLLM's own, built as its runner builds them, and told that their graphs have
been captured. Used on the platform of `fake_gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from leadout.engine.settings import IDLE_DRAFTER_WORKER

FULL, PIECEWISE, EAGER = "FULL", "PIECEWISE", "NONE"


class Graphs:
    """Graphs of the target and of the drafter."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.config import replace, set_current_vllm_config
        from vllm.distributed import parallel_state

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
        # A manager asks for its place in the pipeline; a stage of one is both ends.
        parallel_state._PP = SimpleNamespace(is_first_rank=True, is_last_rank=True)
        self._target = self._target_manager(mode)
        self._drafter: Any = None
        if speculation is not None:
            # As in load_dflash_model, and in what a runner and its worker do with the speculator.
            from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal

            draft = speculation.draft_model_config
            own = replace(
                attention,
                use_non_causal=dflash_has_any_non_causal(draft.hf_config),
                backend=speculation.attention_backend,
            )
            backend, support = self._attention(replace(vllm_config, attention_config=own), draft)
            self.drafter_backend = backend.get_name()
            self._drafter = self._drafter_manager(support, backend, mode)

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
        found = {str(k): self._most_requests(partial(self._of_length, k)) for k in self._lengths()}
        return {k: most for k, most in found.items() if most}

    def gaps(self) -> dict[str, int]:
        """By verified K, how many smaller numbers of requests have no full graph."""
        found = {
            k: sum(self._of_length(int(k), each) != FULL for each in range(1, most))
            for k, most in self.full_graphs().items()
        }
        return {k: count for k, count in found.items() if count}

    def count(self) -> int:
        """How many graphs are captured, of target and drafter."""
        managers = [each for each in (self._target, self._drafter) if each is not None]
        return sum(len(found) for each in managers for found in each._capture_descs.values())

    def _lengths(self) -> range:
        return range(self._drafts + 1)

    def _of_length(self, k: int, requests: int) -> str:
        return self.dispatch([1 + k] * requests)

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

    def _drafter_manager(self, support: Any, backend: Any, mode: Any) -> Any:
        """The graphs of vLLM's speculator, without its tensors; with the subclass of our worker."""
        from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

        from leadout.engine.idle_drafter import skip_idle_drafts

        speculator = object.__new__(DFlashSpeculator)
        speculator.vllm_config, speculator.device = self._config, torch.device("cpu")
        speculator.num_query_per_req = 1 + self._drafts
        speculator.attn_cg_support = SimpleNamespace(
            min_cg_support=support, min_cg_attn_backend=backend.get_name()
        )
        if self._config.parallel_config.worker_cls == IDLE_DRAFTER_WORKER:
            assert skip_idle_drafts(SimpleNamespace(speculator=speculator))
        speculator.init_cudagraph_manager(mode)
        return _captured(speculator.query_cudagraph_manager)

    def _target_manager(self, mode: Any) -> Any:
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        return _captured(
            CudaGraphManager(
                self._config, torch.device("cpu"), mode, decode_query_len=1 + self._drafts
            )
        )


def _captured(manager: Any) -> Any:
    manager._graphs_captured = manager.needs_capture()
    return manager
