"""A drafter for a table of K on vLLM's V2 runner: full graphs for its blocks, idle at K = 0.

The V2 runner of vLLM 0.32 drafts a whole block at every step, whatever K is. The worker here, named
by `worker_cls`, gives the runner's speculator a subclass that differs in two ways:

- Where K = 0, it only stores the keys and values of the context, which later blocks need, and
  leaves out the draft layers and the sampling. On the V1 runner the draft model class does the same
  (`draft_model.py`).
- CUDA graphs of the drafter are captured for whole blocks. vLLM captures them for each K of the
  table instead: if the largest is not in it, each block is drafted without any graph.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from leadout.engine.vllm_adapter import platform_worker
from leadout.engine.vllm_internals import IDLE_DRAFTER, is_usable


def skipping(base: type[Any]) -> type[Any]:
    """A subclass of a V2 DFlash speculator class that does not draft at K = 0."""

    class IdleDrafterSpeculator(base):  # type: ignore[misc]
        vllm_config: Any
        _stores_context_only = False

        def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
            config = self.vllm_config
            self.vllm_config = _without_table(config)
            try:
                super().init_cudagraph_manager(cudagraph_mode)
            finally:
                self.vllm_config = config

        def propose(self, *arguments: Any, **settings: Any) -> Any:
            """[requests, K]; at K = 0 the last drafts, which the runner discards."""
            self._stores_context_only = (
                settings.get("num_speculative_tokens") == 0
                and not settings.get("dummy_run")
                # Data-parallel ranks must run the same graph, and others may draft.
                and settings.get("dp_sync_state") is None
            )
            if self._stores_context_only:
                # A captured draft graph would run the layers too. vLLM runs its parts one by one
                # where it profiles: the context, and then `_generate_draft`.
                settings["is_profile"] = True
            try:
                return super().propose(*arguments, **settings)
            finally:
                self._stores_context_only = False

        def _generate_draft(self, *arguments: Any, **settings: Any) -> None:
            if not self._stores_context_only:
                super()._generate_draft(*arguments, **settings)

    return IdleDrafterSpeculator


def _without_table(vllm_config: Any) -> Any:
    """The config of an engine that always drafts the same number of tokens."""
    config = copy(vllm_config)
    config.speculative_config = copy(vllm_config.speculative_config)
    config.speculative_config.num_speculative_tokens_per_batch_size = None
    return config


def skip_idle_drafts(runner: Any) -> bool:
    """Whether this runner's speculator now has the subclass.

    Called before the model is loaded. A runner without a DFlash speculator stays as it is, and so
    does one whose internals are not those of vLLM 0.32.
    """
    speculator = getattr(runner, "speculator", None)
    if speculator is None or not hasattr(speculator, "_precompute_context_kv"):
        return False
    if not is_usable(IDLE_DRAFTER):
        return False
    speculator.__class__ = skipping(type(speculator))
    return True


class IdleDrafterWorker(platform_worker()):  # type: ignore[misc]
    """vLLM's worker, with a drafter that is idle at K = 0 and has graphs for its blocks."""

    def init_device(self) -> None:
        super().init_device()
        skip_idle_drafts(self.model_runner)
