"""Replaces the drafter of a running server, on all of its workers or on none.

`Swapper` runs in vLLM's API process. It asks every worker (`SwapExtension`) to read and check the
new version while requests continue. Only when all workers have read the same bytes are the weights
replaced, in one call that vLLM carries out between two steps. If a worker fails then, all of them
load the previous weights again.
"""

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
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from leadout.checkpoints import load_weights, read_checkpoint
from leadout.dflash.config import DrafterConfig
from leadout.engine.settings import followed_registry
from leadout.engine.vllm_adapter import call_workers, target_folder
from leadout.errors import LeadoutError
from leadout.models import fingerprint
from leadout.registry import Registry

logger = logging.getLogger("vllm.leadout")

POLL_SECONDS = 0.1
MAX_READ_SECONDS = 600.0


class SwapRefusedError(LeadoutError):
    """The version cannot be served; the server continues with its current drafter."""


class SwapFailedError(LeadoutError):
    """Neither the new nor the previous weights could be loaded on every worker.

    Answers stay correct, since the target verifies every draft, but drafts may be worthless.
    """


@dataclass(frozen=True)
class Swapped:
    """A swap that succeeded; all but `at` goes into the registry's ledger."""

    workers: int
    read_seconds: float  # while requests continued
    pause_seconds: float  # without a step, on the slowest worker
    cache_emptied: bool  # if not, new requests still cannot reach the old entries
    at: float  # Unix time; requests that arrive later are drafted for by the new version


class Swapper:
    """Swaps the drafter through vLLM's engine client."""

    def __init__(self, engine: Any, engines: int = 1) -> None:
        """`engines` of a server with data parallelism swap together."""
        self._engine, self._engines = engine, engines

    async def _call(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return await call_workers(self._engine, self._engines, method, args)

    async def swap(self, version: int, current: int) -> Swapped:
        """Replace version `current` by `version`; SwapRefusedError if nothing has changed."""
        started = time.monotonic()
        try:
            await self._read(version, current)
            read_seconds = time.monotonic() - started
            results = await self._call("leadout_commit", (version,))
            errors = _errors(results)
            if errors:
                undone = _errors(await self._call("leadout_undo"))
                if undone:
                    raise SwapFailedError(
                        f"the previous drafter could not be loaded again: {undone[0]}"
                    )
                raise SwapRefusedError(f"version {version} could not be loaded: {errors[0]}")
        finally:
            await self._call("leadout_end")
        at = time.time()
        emptied = await self._engine.reset_prefix_cache()
        pause = max(result["seconds"] for result in results)
        return Swapped(len(results), read_seconds, pause, bool(emptied), at)

    async def _read(self, version: int, current: int) -> None:
        await self._call("leadout_begin", (version, current))
        deadline = time.monotonic() + MAX_READ_SECONDS
        while True:
            states = await self._call("leadout_state")
            errors = _errors(states)
            if errors:
                raise SwapRefusedError(errors[0])
            if all(state["done"] for state in states):
                break
            if time.monotonic() > deadline:
                raise SwapRefusedError(
                    f"reading version {version} took longer than {MAX_READ_SECONDS:.0f} s"
                )
            await asyncio.sleep(POLL_SECONDS)
        if len({state["digest"] for state in states}) != 1:
            raise SwapRefusedError(f"the workers read different files of version {version}")


def _errors(results: list[dict[str, Any]]) -> list[str]:
    return [result["error"] for result in results if result["error"] is not None]


@dataclass(frozen=True)
class LoadedVersion:
    """A version in memory, ready to be served."""

    version: int
    weights: dict[str, Tensor]
    digest: str  # of the manifest, which contains the hashes of all files


def load_version(
    registry: Registry, version: int, serving: DrafterConfig, target: Path
) -> LoadedVersion:
    """Read a version, and refuse it unless it can replace the drafter in service.

    Its files must be those that were published, for this target, with all values finite, and its
    configuration must be that of the drafter in service: only weights can be replaced.
    """
    manifest = registry.verify(version)
    target_fingerprint = _fingerprint(target)
    if manifest.target_fingerprint != target_fingerprint:
        raise SwapRefusedError(
            f"version {version} was trained for the target with fingerprint "
            f"{manifest.target_fingerprint[:12]}, but this server's target has "
            f"{target_fingerprint[:12]}. Use a separate registry for every target."
        )
    checkpoint = read_checkpoint(registry.path(version))
    for field in fields(DrafterConfig):
        new, current = getattr(checkpoint.config, field.name), getattr(serving, field.name)
        if new != current:
            raise SwapRefusedError(
                f"version {version} has {field.name} {new!r}, but the drafter in service has "
                f"{current!r}. A running server can replace weights only; restart it to serve "
                "this version."
            )
    digest = hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()
    return LoadedVersion(version, load_weights(checkpoint), digest)


# Computed once per process: the files of a served target do not change.
_fingerprint = lru_cache(fingerprint)


class SwapExtension:
    """The worker's part of a swap, mixed into vLLM's worker class (`worker_extension_cls`).

    leadout_begin(version, current)   read and check both, in a thread, while steps continue
    leadout_state()                   whether that is done
    leadout_commit(version)           replace the weights within this call, so between two steps
    leadout_undo()                    load the weights of `current` again
    leadout_end()                     free what was read

    No call raises: with several workers vLLM would leave the results of the others unread.
    """

    def leadout_begin(self, version: int, current: int) -> None:
        self._leadout_reader: _Reader | None = _Reader(self, version, current)

    def leadout_state(self) -> dict[str, Any]:
        reader = getattr(self, "_leadout_reader", None)
        if reader is None:
            return {"done": True, "error": "no version is being read", "digest": None}
        digest = reader.new.digest if reader.is_done and reader.new is not None else None
        return {"done": reader.is_done, "error": reader.error, "digest": digest}

    def leadout_commit(self, version: int) -> dict[str, Any]:
        reader = getattr(self, "_leadout_reader", None)
        if reader is None or reader.version != version or reader.new is None:
            return {"error": f"this worker has not read version {version}", "seconds": 0.0}
        return self._leadout_replace(reader.new)

    def leadout_undo(self) -> dict[str, Any]:
        reader = getattr(self, "_leadout_reader", None)
        if reader is None or reader.previous is None:
            return {"error": "this worker has not read the previous version", "seconds": 0.0}
        return self._leadout_replace(reader.previous)

    def leadout_end(self) -> None:
        self._leadout_reader = None

    def _leadout_replace(self, loaded: LoadedVersion) -> dict[str, Any]:
        started, error = time.perf_counter(), None
        try:
            replace_weights(self, loaded.weights)
        except Exception as problem:
            logger.exception("Leadout could not load version %d", loaded.version)
            error = f"{type(problem).__name__}: {problem}"
        return {"error": error, "seconds": time.perf_counter() - started}


class _Reader:
    """Reads the new version, and the current one in case of an undo, in a thread."""

    def __init__(self, worker: Any, version: int, current: int) -> None:
        self.version = version
        self.new: LoadedVersion | None = None
        self.previous: LoadedVersion | None = None
        self.error: str | None = None
        self._worker = worker
        self._thread = threading.Thread(
            target=self._read, args=(version, current), name="leadout-swap", daemon=True
        )
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def _read(self, version: int, current: int) -> None:
        try:
            vllm_config = self._worker.vllm_config
            registry = followed_registry(vllm_config)
            if registry is None:
                raise SwapRefusedError("this server follows no registry")
            config = self._worker.get_draft_model().drafter_config
            target = target_folder(vllm_config)
            self.new = load_version(registry, version, config, target)
            self.previous = load_version(registry, current, config, target)
        except Exception as error:  # reported to the Swapper
            self.error = str(error) or type(error).__name__


def replace_weights(worker: Any, weights: Mapping[str, Tensor]) -> None:
    """Load weights into the drafter of a worker; its tensors keep their addresses.

    No step may run meanwhile: vLLM takes the layers apart, including those shared with the target.
    """
    drafter = worker.get_draft_model()
    draft_config = worker.vllm_config.speculative_config.draft_model_config
    with set_current_vllm_config(worker.vllm_config), _without_missing_weights_warning():
        initialize_layerwise_reload(drafter)
        try:
            drafter.load_weights(weights.items())
        finally:  # gives layers that were not loaded their tensors back
            finalize_layerwise_reload(drafter, draft_config)


@contextmanager
def _without_missing_weights_warning() -> Iterator[None]:
    """Hide vLLM's warning about the target's embedding and head, which no drafter file contains."""

    def is_other(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in record.getMessage()

    reload_logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    reload_logger.addFilter(is_other)
    try:
        yield
    finally:
        reload_logger.removeFilter(is_other)
