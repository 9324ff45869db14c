"""Replaces the drafter of a running server, on all of its workers or on none.

Every worker reads and checks the version itself while requests go on. Only when all have the same
bytes are the weights replaced, in one call that vLLM carries out between two steps. If a worker
fails at that, all put the weights from before back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("vllm.leadout")  # governed by VLLM_LOGGING_LEVEL

POLL_SECONDS = 0.1
MOST_SECONDS_TO_READ = 600.0


class SwapRefusedError(ValueError):
    """The server goes on with the drafter it has; the message says why."""


class SwapFailedError(RuntimeError):
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
