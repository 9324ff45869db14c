"""The scheduler's part of a swap: requests that come after it have nothing of the old drafter.

A drafter's keys and values of a text lie in the same cache blocks as the target's. After a swap the
cached ones are the old drafter's: right text, but drafts that suit it less. vLLM empties its prefix
cache only when no request runs. So at the reset that follows a swap, requests that come later get
another salt in their block hashes: they find none of the old blocks, which are evicted in time.
Requests under way keep what they have.

Whole answers of those newcomers are tallied, for the watch over what was promised of the drafter.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from leadout.control.rollback import ShortfallTest, Tally
from leadout.engine.capture_store import SOURCE
from leadout.engine.hot_swap import SwapFailedError, Swapped, Swapper, SwapRefusedError
from leadout.engine.small_files import read_small, small_file, write_small
from leadout.errors import LeadoutError
from leadout.registry import Event, Manifest, Pointer, Registry

logger = logging.getLogger("vllm.leadout")  # governed by VLLM_LOGGING_LEVEL

NUMBERS = "served"
SECONDS_BETWEEN_NUMBERS = 1.0


class ServedNumbers(BaseModel):
    """Requests that came after `since`, seconds of the epoch, and have ended."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    since: float
    tally: Tally


class Newcomers:
    """Goes before a scheduler class of vLLM's; an error costs one log line and the tally."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        config = settings["vllm_config"]
        engine = config.parallel_config.data_parallel_rank
        self._numbers_path = small_file(NUMBERS, config.instance_id, engine)
        self._resets = 0
        self._salt: str | None = None
        self._open: dict[str, list[int]] = {}  # by request: steps with a whole block, tokens
        self._tally = Tally()
        self._is_tallying = True
        self._begin_tally()

    def add_request(self, request: Any) -> None:
        if self._salt is not None:
            _salt(request, self._salt)
        self._open[request.request_id] = [0, 0]
        super().add_request(request)  # type: ignore[misc]

    def reset_prefix_cache(self, *arguments: Any, **settings: Any) -> bool:
        is_empty: bool = super().reset_prefix_cache(*arguments, **settings)  # type: ignore[misc]
        self._resets += 1
        self._salt = None if is_empty else f"#leadout-{self._resets}"
        self._begin_tally()
        return is_empty

    def make_spec_decoding_stats(self, *arguments: Any, **settings: Any) -> Any:
        try:
            self._count_step(**settings)
        except Exception as error:
            self._stop_tally(error)
        return super().make_spec_decoding_stats(*arguments, **settings)  # type: ignore[misc]

    def _free_request(self, request: Any, *arguments: Any, **settings: Any) -> Any:
        steps, tokens = self._open.pop(request.request_id, (0, 0))
        if steps:
            self._tally = self._tally.with_request(steps, tokens)
            is_last = len(self.requests) == 1  # type: ignore[attr-defined]
            if is_last or time.monotonic() - self._told >= SECONDS_BETWEEN_NUMBERS:
                self._tell()
        return super()._free_request(request, *arguments, **settings)  # type: ignore[misc]

    def shutdown(self) -> None:
        with suppress(OSError):
            self._numbers_path.unlink(missing_ok=True)
        super().shutdown()  # type: ignore[misc]

    def _begin_tally(self) -> None:
        self._since = time.time()
        self._tally = Tally()
        self._open.clear()  # those under way are no newcomers
        self._tell()

    def _count_step(
        self,
        *,
        request_id: str,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
    ) -> None:
        """Only steps with as many drafts as the server can make are held against a promise."""
        counts = self._open.get(request_id)
        verified = num_draft_tokens - (num_invalid_spec_tokens or {}).get(request_id, 0)
        if counts is not None and verified == self.num_spec_tokens:  # type: ignore[attr-defined]
            counts[0] += 1
            counts[1] += num_accepted_tokens + 1

    def _tell(self) -> None:
        self._told = time.monotonic()
        if self._is_tallying:
            try:
                write_small(ServedNumbers(since=self._since, tally=self._tally), self._numbers_path)
            except OSError as error:
                self._stop_tally(error)

    def _stop_tally(self, error: Exception) -> None:
        self._open.clear()
        if self._is_tallying:
            self._is_tallying = False
            logger.error(
                "Leadout no longer watches whether the drafter keeps its promise: %s: %s. Serving "
                "goes on.",
                type(error).__name__,
                error,
            )


def _salt(request: Any, salt: str) -> None:
    """Let a request, whose blocks vLLM has hashed already, find none from before."""
    request.cache_salt = f"{request.cache_salt or ''}{salt}"
    request.block_hashes.clear()
    request.update_block_hashes()


# Which version a server runs, and whether it keeps what was promised of it.
#
# All changes go through here, one at a time: those by the pointer and those by hand.

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
        self._watch: ShortfallTest | None = None
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
            except (LeadoutError, OSError) as problem:
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
        if watch is None or watch.is_finished:
            return False
        tally = await self._tally()
        shortfall = watch.check(tally) if watch is self._watch else None
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
            watch = "kept" if self._watch.is_finished else "watching"
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
        evidence = {"server": server, **evidence}
        try:
            await asyncio.to_thread(self._registry.record, event, version, why, evidence)
        except OSError as problem:
            logger.warning("Leadout cannot write to the ledger: %s", problem)

    def _permitted(self, version: int) -> Manifest:
        mark = self._registry.bad_mark(version)
        if mark is not None:
            raise SwapRefusedError(f"version {version} is marked: {mark.reason}")
        return self._registry.manifest(version)

    def _watch_over(self, new: Manifest, old: Manifest) -> ShortfallTest | None:
        # The way back is not watched: what was promised of an old version was for older traffic,
        # and one step back must not become a fall.
        promise = new.promises.get(SOURCE)
        if promise is None or new.version < old.version or not self._has_whole_blocks:
            return None
        return ShortfallTest(promise.low)

    async def _tally(self) -> Tally:
        numbers = await asyncio.to_thread(read_small, self._numbers, ServedNumbers)
        # Until the scheduler has begun anew it tells of the requests before.
        return (
            numbers.tally
            if numbers is not None and numbers.since >= self._counted_from
            else Tally()
        )


# Keeps a server on the version that the registry's pointer names, as long as it runs.
#
# The follower acts when the pointer changes: a version that was set by hand stays until then. A
# refused version is not tried again, for versions never change.

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
        pointer = await asyncio.to_thread(self._registry.pointer)
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
