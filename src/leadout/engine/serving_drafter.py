"""Which version a server runs, and whether it keeps what was promised of it.

All changes go through here, one at a time: those by the pointer and those by hand.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from leadout.captured import SOURCE
from leadout.checkpoints import CheckpointError
from leadout.checkpoints.ledger import Entry, Event, append
from leadout.checkpoints.registry import Manifest, Registry
from leadout.control.promise import PromiseWatch, Tally
from leadout.engine.newcomers import ServedNumbers
from leadout.engine.small_files import read_small
from leadout.engine.swap import SwapFailedError, Swapped, Swapper, SwapRefusedError

logger = logging.getLogger("vllm.leadout")  # governed by VLLM_LOGGING_LEVEL

Watching = Literal["off", "watching", "kept", "short"]


@dataclass(frozen=True)
class DrafterReport:
    """What `GET /leadout/drafter` answers."""

    version: int
    fingerprint: str
    since: str  # UTC
    requests: int  # that came since then and have ended
    steps: int
    acceptance_length: float | None
    promised_low: float | None  # of the traffic, lower end of the interval
    watch: Watching


class ServingDrafter:
    """The drafter of this server."""

    def __init__(
        self,
        registry: Registry,
        manifest: Manifest,
        swapper: Swapper,
        numbers: Path,
        *,
        has_whole_blocks: bool,
    ) -> None:
        """`has_whole_blocks`: as many drafts are made as the promises were measured with."""
        self._registry = registry
        self._manifest = manifest
        self._swapper = swapper
        self._numbers = numbers
        self._has_whole_blocks = has_whole_blocks
        self._since = time.time()
        self._counted_from = 0.0  # at the start all requests are new
        self._watch: PromiseWatch | None = None
        self._is_short = False
        self._change = asyncio.Lock()

    @property
    def version(self) -> int:
        return self._manifest.version

    async def change_to(self, version: int, why: str) -> Swapped | None:
        """Swap to a version; None if it is already served. SwapRefusedError: nothing changed."""
        # A client that hangs up must not end it half-way.
        return await asyncio.shield(self._change_to(version, why))

    async def _change_to(self, version: int, why: str) -> Swapped | None:
        async with self._change:
            before = self._manifest
            if version == before.version:
                return None
            try:
                manifest = await asyncio.to_thread(self._permitted, version)
                swapped = await self._swapper.swap(version, before.version)
            except (SwapRefusedError, SwapFailedError, CheckpointError, OSError) as problem:
                logger.error("Leadout refuses version %d: %s", version, problem)
                await self.note("refused", version, str(problem), {})
                if isinstance(problem, SwapFailedError):
                    raise
                raise SwapRefusedError(str(problem)) from None
            self._manifest = manifest
            self._since = self._counted_from = swapped.at
            self._is_short = False
            self._watch = self._watch_over(manifest, before)
        logger.info(
            "Leadout serves version %d of the drafter instead of %d; the swap paused steps for "
            "%.0f ms",
            version,
            before.version,
            1000 * swapped.pause_seconds,
        )
        facts = {name: value for name, value in asdict(swapped).items() if name != "at"}
        await self.note("swapped", version, why, {"from": before.version, **facts})
        return swapped

    async def has_fallen_short(self) -> bool:
        """Whether new requests accept less than was promised; the version is then given up."""
        watch, version = self._watch, self.version
        if watch is None or watch.is_over:
            return False
        tally = await self._tally()
        shortfall = watch.look(tally) if watch is self._watch else None
        if shortfall is None:
            return False
        self._watch, self._is_short = None, True
        why = str(shortfall)
        logger.warning("Leadout rolls back version %d of the drafter: %s", version, why)
        pointer = await asyncio.to_thread(self._registry.roll_back, version, why)
        if pointer is not None:
            evidence = {"to": pointer.version, **asdict(shortfall)}
            await self.note("rolled_back", version, why, evidence)
        return True

    async def report(self) -> DrafterReport:
        tally, promise = await self._tally(), self._manifest.promises.get(SOURCE)
        watch: Watching = "off"
        if self._is_short:
            watch = "short"
        elif self._watch is not None:
            watch = "kept" if self._watch.is_over else "watching"
        return DrafterReport(
            version=self.version,
            fingerprint=self._manifest.fingerprint,
            since=datetime.fromtimestamp(self._since, UTC).isoformat(timespec="milliseconds"),
            requests=tally.requests,
            steps=tally.steps,
            acceptance_length=tally.acceptance_length,
            promised_low=None if promise is None else promise.low,
            watch=watch,
        )

    async def note(
        self,
        event: Event,
        version: int,
        why: str,
        evidence: dict[str, float | int | str | bool],
    ) -> None:
        """Into the ledger; a registry that this server cannot write to costs one log line."""
        server = f"{socket.gethostname()}:{os.getpid()}"
        entry = Entry(
            event=event, version=version, why=why, evidence={"server": server, **evidence}
        )
        try:
            await asyncio.to_thread(append, self._registry.folder, entry)
        except OSError as problem:
            logger.warning("Leadout cannot write to the ledger: %s", problem)

    def _permitted(self, version: int) -> Manifest:
        mark = self._registry.mark_of(version)
        if mark is not None:
            raise SwapRefusedError(f"version {version} is marked: {mark.reason}")
        return self._registry.manifest(version)

    def _watch_over(self, new: Manifest, old: Manifest) -> PromiseWatch | None:
        # The way back is not watched: what was promised of an old version was for older traffic,
        # and one step back must not become a fall.
        promise = new.promises.get(SOURCE)
        if promise is None or new.version < old.version or not self._has_whole_blocks:
            return None
        return PromiseWatch(promise.low)

    async def _tally(self) -> Tally:
        numbers = await asyncio.to_thread(read_small, self._numbers, ServedNumbers)
        # Until the scheduler has begun anew it tells of the requests before.
        return (
            numbers.tally
            if numbers is not None and numbers.since >= self._counted_from
            else Tally()
        )
