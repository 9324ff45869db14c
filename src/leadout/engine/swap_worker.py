"""What each worker of vLLM does in a swap (`worker_extension_cls`), called by `swap.Swapper`.

    leadout_begin(version)    read and check it, in a thread, while steps go on
    leadout_state()           how far that is
    leadout_commit(version)   replace the drafter's weights, within one call: between two steps
    leadout_undo()            put the weights from before back
    leadout_end()             forget what was read

A call never raises: with several workers vLLM would leave the others' answers unread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from leadout.engine.folders import local_folder
from leadout.engine.registry_settings import registry_of
from leadout.engine.staged import Staged, read_version

logger = init_logger("vllm.leadout")


class Reading:
    """One version, and the one in service for the way back, read in a thread."""

    def __init__(self, worker: Any, version: int, serving: int) -> None:
        self.version = version
        self.new: Staged | None = None
        self.old: Staged | None = None
        self.error: str | None = None
        self._worker = worker
        self._thread = threading.Thread(
            target=self._read, args=(version, serving), name="leadout-swap", daemon=True
        )
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def _read(self, version: int, serving: int) -> None:
        try:
            config = self._worker.vllm_config
            registry = registry_of(config)
            if registry is None:
                raise ValueError("found no registry in this server's settings, wanted one")
            shape = self._worker.get_draft_model().drafter_config
            target = local_folder(config.model_config.model)
            self.new = read_version(registry, version, shape, target)
            self.old = read_version(registry, serving, shape, target)
        except Exception as error:  # told to the caller, who decides
            self.error = f"{error}" if str(error) else type(error).__name__


class SwapExtension:
    """Mixed into vLLM's worker class, whose attributes it uses."""

    def leadout_begin(self, version: int, serving: int) -> None:
        self._leadout_reading: Reading | None = Reading(self, version, serving)

    def leadout_state(self) -> dict[str, Any]:
        reading = getattr(self, "_leadout_reading", None)
        if reading is None:
            return {"done": True, "error": "nothing is being read", "digest": None}
        digest = reading.new.digest if reading.is_done and reading.new is not None else None
        return {"done": reading.is_done, "error": reading.error, "digest": digest}

    def leadout_commit(self, version: int) -> dict[str, Any]:
        reading = getattr(self, "_leadout_reading", None)
        if reading is None or reading.version != version or reading.new is None:
            return {"error": f"version {version} was not read here", "seconds": 0.0}
        return self._leadout_replace(reading.new)

    def leadout_undo(self) -> dict[str, Any]:
        reading = getattr(self, "_leadout_reading", None)
        if reading is None or reading.old is None:
            return {"error": "the version before was not read here", "seconds": 0.0}
        return self._leadout_replace(reading.old)

    def leadout_end(self) -> None:
        self._leadout_reading = None

    def _leadout_replace(self, staged: Staged) -> dict[str, Any]:
        begun = time.perf_counter()
        error = None
        try:
            replace_weights(self, staged.weights)
        except Exception as problem:
            logger.exception("Leadout could not load version %d", staged.version)
            error = f"{type(problem).__name__}: {problem}"
        return {"error": error, "seconds": time.perf_counter() - begun}


def replace_weights(worker: Any, weights: Mapping[str, Tensor]) -> None:
    """Load a drafter's weights into the one that runs; its tensors stay where they are.

    Nothing may step in between: vLLM takes the layers apart, the target's shared ones included.
    """
    drafter = worker.get_draft_model()
    draft_config = worker.vllm_config.speculative_config.draft_model_config
    with set_current_vllm_config(worker.vllm_config), _no_word_on_borrowed_layers():
        initialize_layerwise_reload(drafter)
        try:
            drafter.load_weights(weights.items())
        finally:  # whatever was not loaded gets its tensors back
            finalize_layerwise_reload(drafter, draft_config)


@contextmanager
def _no_word_on_borrowed_layers() -> Iterator[None]:
    """Leave out vLLM's warning that the target's embedding and head were not in the file."""

    def is_other(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in record.getMessage()

    reload = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    reload.addFilter(is_other)
    try:
        yield
    finally:
        reload.removeFilter(is_other)
