"""Replaces the drafter of a running server, on all of its workers or on none.

`Swapper` runs in vLLM's API process. It asks every worker (`SwapExtension`) to read, check and
stage the new version while requests continue. Only when all workers have read the same bytes are
the weights replaced, in one call that vLLM carries out between two steps and that only copies. If a
worker fails then, all of them copy the previous weights back.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from leadout.checkpoints import load_weights, read_checkpoint
from leadout.dflash.config import DrafterConfig
from leadout.engine.settings import followed_registry
from leadout.engine.staging import RuntimeWeights, StagedSwap, runtime_weights, stage
from leadout.engine.vllm_adapter import (
    call_workers,
    is_asleep,
    target_folder,
    watch_for_failure,
)
from leadout.errors import LeadoutError
from leadout.files import FileError
from leadout.models import fingerprint
from leadout.registry import Manifest, MissingVersionError, Registry, RegistryError
from leadout.storage import StorageError

logger = logging.getLogger("vllm.leadout")

POLL_SECONDS = 0.1
MAX_READ_SECONDS = 600.0
ASLEEP = "the engine is asleep or paused"
NOTHING_READ = "no version is being read"


class SwapRefusedError(LeadoutError):
    """The version can never be served; the server continues with its current drafter."""


class NotNowError(LeadoutError):
    """The version could not be loaded this time; the server continues with its current drafter."""


class EngineAsleepError(NotNowError):
    """The weights of a sleeping engine have no memory; the swap is possible once it is awake."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"{ASLEEP}, so version {version} cannot be loaded. Wake it up (`POST /wake_up`, or "
            "`POST /resume` after a pause) and try again."
        )


class SwapFailedError(LeadoutError):
    """Neither the new nor the previous weights could be loaded on every worker.

    Answers stay correct, since the target verifies every draft, but drafts may be worthless.
    """


@dataclass(frozen=True)
class Swapped:
    """A swap that succeeded; all but `at` goes into the registry's ledger."""

    workers: int
    read_seconds: float  # reading, checking and staging, while requests continued
    pause_seconds: float  # without a step, on the slowest worker
    cache_emptied: bool  # if not, new requests still cannot reach the old entries
    at: float  # Unix time; requests that arrive later are drafted for by the new version


class Swapper:
    """Swaps the drafter through vLLM's engine client."""

    def __init__(self, engine: Any, engines: int = 1) -> None:
        """`engines` of a server with data parallelism swap together."""
        self._engine, self._engines = engine, engines
        self._is_reset_pending = False
        self.has_failed = watch_for_failure(engine)

    async def _call(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return await call_workers(self._engine, self._engines, method, args)

    async def swap(self, version: int) -> Swapped:
        """Replace the drafter by `version`.

        Nothing has changed after SwapRefusedError, if the version can never be loaded, and after
        NotNowError, if trying again may help.
        """
        started = time.monotonic()
        try:
            await self._stage(version)
            read_seconds = time.monotonic() - started
            await self._require_awake(version)
            results, errors = await self._commit(version)
            if ASLEEP in errors:  # fell asleep just now; workers do so together, before the call
                raise EngineAsleepError(version)
            if errors:
                await self._undo()
                raise NotNowError(f"version {version} could not be loaded: {errors[0]}")
        finally:
            await self._end()
        # The workers run the new version. Whatever fails from here on does not change that.
        at, self._is_reset_pending = time.time(), True
        emptied = await self.finish()
        pause = max(result["seconds"] for result in results)
        return Swapped(len(results), read_seconds, pause, emptied, at)

    async def finish(self) -> bool:
        """Separate new requests from the old drafter's cache, unless that is done.

        To be called again if it failed: until then new requests may find the old drafter's entries,
        and none is counted for the new version.
        """
        if not self._is_reset_pending:
            return False
        try:
            emptied = bool(await self._engine.reset_prefix_cache())
        except Exception as error:
            logger.warning(
                "Leadout could not reset the prefix cache after a swap: %s: %s. It tries again.",
                type(error).__name__,
                error,
            )
            return False
        self._is_reset_pending = False
        return emptied

    async def _commit(self, version: int) -> tuple[list[dict[str, Any]], list[str]]:
        try:
            results = await self._call("leadout_commit", (version,))
        except Exception as error:  # then some workers may have loaded it
            return [], [f"{type(error).__name__}: {error}"]
        return results, _errors(results)

    async def _undo(self) -> None:
        try:
            errors = _errors(await self._call("leadout_undo"))
        except Exception as error:
            errors = [f"{type(error).__name__}: {error}"]
        if errors:
            raise SwapFailedError(f"the previous drafter could not be loaded again: {errors[0]}")

    async def _end(self) -> None:
        try:
            await self._call("leadout_end")
        except Exception as error:
            logger.warning("Leadout could not free staged weights: %s", error)

    async def _require_awake(self, version: int) -> None:
        if await self._engine.is_sleeping():
            raise EngineAsleepError(version)

    async def _stage(self, version: int) -> None:
        await self._require_awake(version)
        await self._call("leadout_begin", (version,))
        deadline = time.monotonic() + MAX_READ_SECONDS
        while True:
            states = await self._call("leadout_state")
            errors = _errors(states)
            if ASLEEP in errors:
                raise EngineAsleepError(version)
            final = _errors([state for state in states if state["final"]])
            if final:
                raise SwapRefusedError(final[0])
            if errors:
                raise NotNowError(errors[0])
            if all(state["done"] for state in states):
                break
            if time.monotonic() > deadline:
                raise NotNowError(
                    f"reading version {version} took longer than {MAX_READ_SECONDS:.0f} s"
                )
            await asyncio.sleep(POLL_SECONDS)
        if len({state["digest"] for state in states}) != 1:
            raise NotNowError(f"the workers read different files of version {version}")


def is_final(error: BaseException) -> bool:
    """Whether trying again cannot help: the version itself is wrong, and versions never change.

    An error of storage or memory says nothing about the version, even if it was reported as one of
    the checkpoint that could not be read.
    """
    if isinstance(error, NotNowError | SwapFailedError | FileError | MissingVersionError):
        return False
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError | MemoryError):
            return False
        cause = cause.__cause__ or cause.__context__
    return isinstance(error, LeadoutError)


def _errors(results: list[dict[str, Any]]) -> list[str]:
    return [result["error"] for result in results if result["error"] is not None]


@dataclass(frozen=True)
class LoadedVersion:
    """A version in memory, checked."""

    version: int
    weights: dict[str, Tensor]
    digest: str  # of the manifest, which contains the hashes of all files


def version_to_start_with(registry: Registry, target: Path) -> tuple[int, LeadoutError | None]:
    """The pointer's version, or its nearest ancestor that can be served and what is wrong with it.

    Servers that run refuse a version that cannot be served and keep theirs. One that starts at such
    a moment must come up, too. It raises what is wrong if there is no such ancestor.
    """
    version = registry.require_pointer().version
    problem: LeadoutError | None = None
    while True:
        try:
            _require_target(registry.verify(version), target)
            load_weights(read_checkpoint(registry.path(version)))
            return version, problem
        except StorageError:  # says nothing about the version, like an OSError of a folder
            raise
        except LeadoutError as found:
            problem = problem or found
        try:
            version = registry.good_ancestor(version)
        except RegistryError:
            raise problem from None


def load_version(
    registry: Registry, version: int, serving: DrafterConfig, target: Path
) -> LoadedVersion:
    """Read a version, and refuse it unless it can replace the drafter in service.

    Its files must be those that were published, for this target, with all values finite, and its
    configuration must be that of the drafter in service: only weights can be replaced.
    """
    with registry.private_copy(version) as (manifest, folder):
        _require_target(manifest, target)
        checkpoint = read_checkpoint(folder)
        for field in fields(DrafterConfig):
            new, current = getattr(checkpoint.config, field.name), getattr(serving, field.name)
            if new != current:
                raise SwapRefusedError(
                    f"version {version} has {field.name} {new!r}, but the drafter in service has "
                    f"{current!r}. A running server can replace weights only; restart it to serve "
                    "this version."
                )
        weights = load_weights(checkpoint)
    digest = hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()
    return LoadedVersion(version, weights, digest)


def _require_target(manifest: Manifest, target: Path) -> None:
    target_fingerprint = _fingerprint(target)
    if manifest.target_fingerprint != target_fingerprint:
        raise SwapRefusedError(
            f"version {manifest.version} was trained for the target with fingerprint "
            f"{manifest.target_fingerprint[:12]}, but this server's target has "
            f"{target_fingerprint[:12]}. Use a separate registry for every target."
        )


# Computed once per process: the files of a served target do not change.
_fingerprint = lru_cache(fingerprint)


class SwapExtension:
    """The worker's part of a swap, mixed into vLLM's worker class (`worker_extension_cls`).

    leadout_begin(version)     read, check and stage a version, in a thread, while steps continue
    leadout_state()            whether that is done
    leadout_commit(version)    replace the weights within this call, so between two steps
    leadout_undo()             replace them by those before
    leadout_end()              free what was staged

    No call raises: with several workers vLLM would leave the results of the others unread.
    """

    def leadout_begin(self, version: int) -> None:
        self._leadout_stager: _Stager | None = _Stager(self, version)

    def leadout_state(self) -> dict[str, Any]:
        stager = getattr(self, "_leadout_stager", None)
        if stager is None:
            return {"done": True, "error": NOTHING_READ, "digest": None, "final": False}
        return {
            "done": stager.is_done,
            "error": stager.error,
            "digest": stager.digest,
            "final": stager.is_error_final,
        }

    def leadout_commit(self, version: int) -> dict[str, Any]:
        stager = getattr(self, "_leadout_stager", None)
        if stager is None or stager.version != version or stager.staged is None:
            return {"error": f"this worker has not read version {version}", "seconds": 0.0}
        return self._leadout_write(stager.staged, StagedSwap.commit)

    def leadout_undo(self) -> dict[str, Any]:
        stager = getattr(self, "_leadout_stager", None)
        if stager is None or stager.staged is None:
            return {"error": "this worker has not kept the previous weights", "seconds": 0.0}
        return self._leadout_write(stager.staged, StagedSwap.undo)

    def leadout_end(self) -> None:
        stager = getattr(self, "_leadout_stager", None)
        self._leadout_stager = None
        if stager is not None:  # returning gigabytes to the system takes a while
            threading.Thread(target=stager.free, name="leadout-swap-end", daemon=True).start()

    def _leadout_write(
        self, staged: StagedSwap, write: Callable[[StagedSwap], None]
    ) -> dict[str, Any]:
        if is_asleep(self):
            return {"error": ASLEEP, "seconds": 0.0}
        started, error = time.perf_counter(), None
        try:
            write(staged)
        except Exception as problem:
            logger.exception("Leadout could not replace the drafter's weights")
            error = f"{type(problem).__name__}: {problem}"
        return {"error": error, "seconds": time.perf_counter() - started}


class _Stager:
    """Stages a version in a thread, next to a copy of the weights in service."""

    def __init__(self, worker: Any, version: int) -> None:
        self.version = version
        self.staged: StagedSwap | None = None
        self.digest: str | None = None
        self.error: str | None = None
        self.is_error_final = False
        self._worker = worker
        self._previous: RuntimeWeights | None = None
        self._thread = threading.Thread(target=self._stage, name="leadout-swap", daemon=True)
        if worker.vllm_config.model_config.enable_sleep_mode:
            # The engine may fall asleep while the thread runs, and then there is nothing to copy.
            self._copy_unless_asleep()
        if self.error is None:
            self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def free(self) -> None:
        if self._thread.ident is not None:  # it has been started
            self._thread.join()
        self.staged = self._previous = None

    def _copy_unless_asleep(self) -> None:
        try:
            if is_asleep(self._worker):
                self.error = ASLEEP
            else:
                self._previous = self._copy_of_serving()
        except Exception as error:
            self.error = str(error) or type(error).__name__

    def _copy_of_serving(self) -> RuntimeWeights:
        return runtime_weights(self._worker.get_draft_model()).in_host_memory()

    def _stage(self) -> None:
        try:
            vllm_config = self._worker.vllm_config
            registry = followed_registry(vllm_config)
            if registry is None:
                raise SwapRefusedError("this server follows no registry")
            drafter = self._worker.get_draft_model()
            target = target_folder(vllm_config)
            loaded = load_version(registry, self.version, drafter.drafter_config, target)
            new = stage(drafter, self._worker.get_model(), loaded.weights)
            self.digest = loaded.digest
            del loaded  # before the copy, for the sake of memory
            self.staged = StagedSwap(drafter, new, self._previous or self._copy_of_serving())
        except Exception as error:  # reported to the Swapper
            self.is_error_final = is_final(error)
            self.error = str(error) or type(error).__name__
