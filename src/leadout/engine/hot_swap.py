"""A version of the registry read into memory, with all that must hold before it may be served."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from leadout.checkpoints import CheckpointError, load_weights, read_checkpoint
from leadout.checkpoints.errors import Phrase
from leadout.dflash.config import DrafterConfig
from leadout.engine.settings import followed_registry
from leadout.errors import LeadoutError
from leadout.models import fingerprint, local_folder
from leadout.registry import MANIFEST, Registry


@dataclass(frozen=True)
class Staged:
    version: int
    weights: dict[str, Tensor]
    digest: str  # of the manifest, which has those of all files


def read_version(registry: Registry, version: int, serving: DrafterConfig, target: Path) -> Staged:
    """The published bytes, for this target, of the serving drafter's shape, all values finite."""
    manifest = registry.verify(version)
    folder = registry.path(version)
    found = _fingerprint_of(target)
    if manifest.target_fingerprint != found:
        raise CheckpointError(
            folder / MANIFEST,
            "target_fingerprint",
            Phrase(f"is {manifest.target_fingerprint[:12]}"),
            f"{found[:12]}, that of the served target",
            "Use a registry of its own for every target.",
        )
    checkpoint = read_checkpoint(folder)
    _require_same_shape(checkpoint.config, serving, folder)
    digest = hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()
    return Staged(version, load_weights(checkpoint), digest)


def _require_same_shape(found: DrafterConfig, serving: DrafterConfig, folder: Path) -> None:
    """Everything but the weights is built into a running engine."""
    for field in fields(DrafterConfig):
        new, old = getattr(found, field.name), getattr(serving, field.name)
        if new != old:
            raise CheckpointError(
                folder,
                field.name,
                new,
                f"{old!r}, that of the drafter in service",
                "Only weights can be replaced in a running server; start one on this version.",
            )


@lru_cache
def _fingerprint_of(target: Path) -> str:
    """Once for a process: a served target's files do not change under it."""
    return fingerprint(target)


# What each worker of vLLM does in a swap (`worker_extension_cls`), called by `swap.Swapper`.
#
#     leadout_begin(version)    read and check it, in a thread, while steps go on
#     leadout_state()           how far that is
#     leadout_commit(version)   replace the drafter's weights, within one call: between two steps
#     leadout_undo()            put the weights from before back
#     leadout_end()             forget what was read
#
# A call never raises: with several workers vLLM would leave the others' answers unread.

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
            registry = followed_registry(config)
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


# Replaces the drafter of a running server, on all of its workers or on none.
#
# Every worker reads and checks the version itself while requests go on. Only when all have the same
# bytes are the weights replaced, in one call that vLLM carries out between two steps. If a worker
# fails at that, all put the weights from before back.

logger = logging.getLogger("vllm.leadout")  # governed by VLLM_LOGGING_LEVEL

POLL_SECONDS = 0.1
MOST_SECONDS_TO_READ = 600.0


class SwapRefusedError(LeadoutError):
    """The server goes on with the drafter it has; the message says why."""


class SwapFailedError(LeadoutError):
    """Neither the new weights nor those from before could be loaded on every worker.

    Answers stay right, for the target checks every draft; but drafts may be worthless.
    """


@dataclass(frozen=True)
class Swapped:
    workers: int
    read_seconds: float  # beside the running requests
    pause_seconds: float  # in which no step was made, on the slowest worker
    cache_emptied: bool  # at once; otherwise old entries are out of reach of new requests
    at: float  # requests that came after it, in seconds of the epoch, are the new drafter's


class Swapper:
    def __init__(self, engine: Any) -> None:
        """`engine` is vLLM's client of its engine."""
        self._engine = engine

    async def swap(self, version: int, serving: int) -> Swapped:
        begun = time.monotonic()
        try:
            await self._read(version, serving)
            read_seconds = time.monotonic() - begun
            done = await self._engine.collective_rpc("leadout_commit", args=(version,))
            errors = [worker["error"] for worker in done if worker["error"] is not None]
            if errors:
                await self._undo()
                raise SwapRefusedError(f"version {version} could not be loaded: {errors[0]}")
        finally:
            await self._engine.collective_rpc("leadout_end")
        at = time.time()
        emptied = await self._engine.reset_prefix_cache()
        pause = max(worker["seconds"] for worker in done)
        return Swapped(len(done), read_seconds, pause, bool(emptied), at)

    async def _read(self, version: int, serving: int) -> None:
        await self._engine.collective_rpc("leadout_begin", args=(version, serving))
        deadline = time.monotonic() + MOST_SECONDS_TO_READ
        while True:
            workers = await self._engine.collective_rpc("leadout_state")
            errors = [worker["error"] for worker in workers if worker["error"] is not None]
            if errors:
                raise SwapRefusedError(errors[0])
            if all(worker["done"] for worker in workers):
                break
            if time.monotonic() > deadline:
                raise SwapRefusedError(
                    f"version {version} was not read within {MOST_SECONDS_TO_READ:.0f} s"
                )
            await asyncio.sleep(POLL_SECONDS)
        if len({worker["digest"] for worker in workers}) != 1:
            raise SwapRefusedError(f"version {version}: the workers read different files")

    async def _undo(self) -> None:
        undone = await self._engine.collective_rpc("leadout_undo")
        errors = [worker["error"] for worker in undone if worker["error"] is not None]
        if errors:
            raise SwapFailedError(f"the drafter from before could not be put back: {errors[0]}")
