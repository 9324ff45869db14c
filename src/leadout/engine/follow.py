"""Keeps a server on the version that the registry's pointer names, as long as it runs.

The follower acts when the pointer changes: a version that was set by hand stays until then. A
refused version is not tried again, for versions never change.
"""

from __future__ import annotations

import asyncio
import logging
import time

from leadout.checkpoints.registry import Pointer, Registry
from leadout.engine.serving_drafter import ServingDrafter
from leadout.engine.swap import SwapRefusedError

logger = logging.getLogger("vllm.leadout")  # governed by VLLM_LOGGING_LEVEL

POLL_SECONDS = 2.0
SECONDS_BETWEEN_LOG_LINES = 60.0


class Follower:
    def __init__(self, registry: Registry, drafter: ServingDrafter) -> None:
        self._registry = registry
        self._drafter = drafter
        self._followed: Pointer | None = None
        self._refused: set[int] = set()
        self._last_log_line = -SECONDS_BETWEEN_LOG_LINES

    async def follow(self) -> None:
        """For ever; an error, such as storage that is away, costs a log line a minute."""
        await self._drafter.note("started", self._drafter.version, "a server started on it", {})
        while True:
            try:
                await self.look()
            except Exception as error:
                self._complain(error)
            await asyncio.sleep(POLL_SECONDS)

    async def look(self) -> None:
        pointer = await asyncio.to_thread(self._registry.serving)
        if pointer is None or pointer == self._followed:
            if await self._drafter.has_fallen_short():
                self._followed = None  # go where the pointer leads now, also from one set by hand
            return
        self._followed = pointer
        if pointer.version in self._refused:
            return
        try:
            await self._drafter.change_to(pointer.version, pointer.reason)
        except SwapRefusedError:
            self._refused.add(pointer.version)

    def _complain(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._last_log_line >= SECONDS_BETWEEN_LOG_LINES:
            self._last_log_line = now
            logger.error(
                "Leadout could not look after the drafter: %s: %s. Serving goes on, and so does "
                "the looking.",
                type(error).__name__,
                error,
            )
