"""Keeps a server on the drafter version that its registry's pointer names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from leadout.engine.fail_safe import Backoff, LimitedLog
from leadout.engine.hot_swap import (
    EngineAsleepError,
    NotNowError,
    SwapFailedError,
    SwapRefusedError,
)
from leadout.engine.rollout import ServingDrafter
from leadout.registry import Pointer, Registry

POLL_SECONDS = 2.0


class Follower:
    """Keeps a server on the version that the registry's pointer names.

    It acts when the pointer changes: a version that was set by hand stays until then. A version
    that can never be served is not tried again, since versions never change. What may succeed
    later, such as reading from storage that is unreachable, is tried again.
    """

    def __init__(self, registry: Registry, drafter: ServingDrafter) -> None:
        self._registry, self._drafter = registry, drafter
        self._followed: Pointer | None = None
        self._tried: Pointer | None = None
        self._refused: set[int] = set()
        self._retry = Backoff()
        self._log = LimitedLog(logging.ERROR)

    async def follow(self) -> None:
        """Run for ever; errors, such as storage that is unreachable, are logged once a minute."""
        why, is_started = "a server started with it", False
        await self._try(self._drafter.record("started", self._drafter.version, why))
        try:
            while True:
                is_started = is_started or await self._try(self._drafter.start())
                await self._try(self.poll())
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self._drafter.stop()

    async def _try(self, step: Awaitable[None]) -> bool:
        try:
            await step
            return True
        except Exception as error:
            self._log(
                "Leadout could not follow the registry: %s: %s. Serving goes on, and Leadout "
                "tries again.",
                type(error).__name__,
                error,
            )
            return False

    async def poll(self) -> None:
        await self._drafter.advance()
        pointer = await asyncio.to_thread(self._registry.pointer)
        if pointer is not None and self._drafter.avoids(pointer.version):
            self._followed = None  # to be followed once it is not avoided any more
            return
        if pointer is None or pointer == self._followed:
            return
        if pointer.version in self._refused:
            self._followed = pointer
            return
        if pointer != self._tried:  # a new one does not wait for the retry of another
            self._tried = pointer
            self._retry.reset()
        if not self._retry.is_due:
            return
        try:
            await self._drafter.change_to(pointer.version, pointer.reason)
        except EngineAsleepError:
            return  # to be followed as soon as it is awake
        except SwapRefusedError:
            self._refused.add(pointer.version)
        except (NotNowError, SwapFailedError):
            self._retry.failed()
            raise
        self._followed = pointer
        self._retry.reset()
