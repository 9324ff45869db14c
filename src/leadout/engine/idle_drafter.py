"""Steps that draft nothing cost only the drafter's context, on vLLM's V2 runner too.

Where K = 0, the V2 runner of vLLM 0.32 still drafts the whole block and then ignores it. The worker
here, named by `worker_cls`, gives the runner's speculator a subclass that only stores the keys and
values of the context, which later blocks need, and leaves out the draft layers and the sampling. On
the V1 runner the draft model class does the same (`draft_model.py`).
"""

from __future__ import annotations

from typing import Any

from leadout.engine.vllm_adapter import IDLE_DRAFTER, is_usable, platform_worker


def skipping(base: type[Any]) -> type[Any]:
    """A subclass of a V2 DFlash speculator class that does not draft at K = 0."""

    class IdleDrafterSpeculator(base):  # type: ignore[misc]
        _stores_context_only = False

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


def skip_idle_drafts(runner: Any) -> bool:
    """Whether this runner's speculator now skips its layers at K = 0.

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
    """vLLM's worker, with a drafter that is idle at K = 0."""

    def init_device(self) -> None:
        super().init_device()
        skip_idle_drafts(self.model_runner)
