"""Rolls drafter versions out to a running server: follow the pointer, compare, roll back.

- `Follower` keeps a server on the version that the registry's pointer names.
- `ServingDrafter` is the version that the server runs. All changes go through it, one at a time. It
  compares the acceptance length of requests since the swap with what was expected of the version,
  and rolls the version back if they fall short.
- `RolloutMixin` is the scheduler's part: it counts those requests, and keeps the old drafter's
  cache entries from them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from leadout.control.rollback import ShortfallTest, Tally
from leadout.engine.capture_store import SOURCE
from leadout.engine.counters import read_small, small_file, write_small
from leadout.engine.fail_safe import FailSafe, LimitedLog
from leadout.engine.hot_swap import (
    EngineAsleepError,
    SwapFailedError,
    Swapped,
    Swapper,
    SwapRefusedError,
)
from leadout.engine.vllm_adapter import engine_index
from leadout.errors import LeadoutError
from leadout.registry import Event, Evidence, Manifest, Pointer, Registry

logger = logging.getLogger("vllm.leadout")

POLL_SECONDS = 2.0
SECONDS_BETWEEN_WRITES = 1.0
MASK_BYTES = 64  # as long as the longest hash


class ServedRequests(BaseModel):
    """Finished requests that arrived after `since` (Unix time), in a file of the scheduler's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    since: float
    tally: Tally


def served_requests_file(vllm_config: Any, engine: int) -> Path:
    return small_file("served", vllm_config.instance_id, engine)


WatchState = Literal["off", "watching", "passed", "failed"]


@dataclass(frozen=True)
class DrafterReport:
    """The answer to `GET /leadout/drafter`."""

    version: int
    fingerprint: str
    since: str  # UTC
    requests: int  # arrived since then and finished
    steps: int
    acceptance_length: float | None
    expected_low: float | None  # lower end of the interval that was measured before publishing
    watch: WatchState  # whether the acceptance length is compared with it


class ServingDrafter:
    """The version that this server runs."""

    def __init__(
        self,
        registry: Registry,
        manifest: Manifest,
        swapper: Swapper,
        served_paths: Sequence[Path],
        *,
        drafts_whole_blocks: bool,
    ) -> None:
        """`manifest` is that of the version that the server started with.

        `drafts_whole_blocks`: the server drafts as many tokens as the drafter can, which is how
        expected acceptance is measured.
        """
        self._registry, self._manifest = registry, manifest
        self._swapper, self._served_paths = swapper, served_paths
        self._drafts_whole_blocks = drafts_whole_blocks
        self._since = time.time()
        self._counted_since = 0.0  # before the first swap every request counts
        self._watch: ShortfallTest | None = None
        self._has_failed = False
        self._change = asyncio.Lock()

    @property
    def version(self) -> int:
        return self._manifest.version

    async def change_to(self, version: int, why: str) -> Swapped | None:
        """Swap to a version; None if it is served already. SwapRefusedError: nothing changed."""
        # A client that disconnects must not interrupt a swap.
        return await asyncio.shield(self._change_to(version, why))

    async def _change_to(self, version: int, why: str) -> Swapped | None:
        async with self._change:
            previous = self._manifest
            if version == previous.version:
                return None
            try:
                manifest = await asyncio.to_thread(self._servable, version)
                swapped = await self._swapper.swap(version)
            except EngineAsleepError:  # nothing is wrong with the version
                raise
            except (LeadoutError, OSError) as problem:
                logger.error("Leadout refuses version %d of the drafter: %s", version, problem)
                await self.record("refused", version, str(problem))
                if isinstance(problem, SwapFailedError):
                    raise
                raise SwapRefusedError(str(problem)) from None
            self._manifest = manifest
            self._since = self._counted_since = swapped.at
            self._has_failed = False
            self._watch = self._watch_for(manifest, previous)
        logger.info(
            "Leadout serves version %d of the drafter instead of %d; the swap paused serving for "
            "%.0f ms",
            version,
            previous.version,
            1000 * swapped.pause_seconds,
        )
        facts = {name: value for name, value in asdict(swapped).items() if name != "at"}
        await self.record("swapped", version, why, {"from": previous.version, **facts})
        return swapped

    async def roll_back_if_below_expected(self) -> bool:
        """Give the version up if requests since the swap accept less than was expected of it."""
        watch, version = self._watch, self.version
        if watch is None or watch.is_finished:
            return False
        tally = await self._tally()
        shortfall = watch.check(tally) if watch is self._watch else None
        if shortfall is None:
            return False
        self._watch, self._has_failed = None, True
        why = str(shortfall)
        logger.warning("Leadout rolls back version %d of the drafter: %s", version, why)
        pointer = await asyncio.to_thread(self._registry.roll_back, version, why)
        if pointer is not None:
            evidence = {"to": pointer.version, **asdict(shortfall)}
            await self.record("rolled_back", version, why, evidence)
        return True

    async def report(self) -> DrafterReport:
        tally, expected = await self._tally(), self._manifest.promises.get(SOURCE)
        watch: WatchState = "off"
        if self._has_failed:
            watch = "failed"
        elif self._watch is not None:
            watch = "passed" if self._watch.is_finished else "watching"
        return DrafterReport(
            version=self.version,
            fingerprint=self._manifest.fingerprint,
            since=datetime.fromtimestamp(self._since, UTC).isoformat(timespec="milliseconds"),
            requests=tally.requests,
            steps=tally.steps,
            acceptance_length=tally.acceptance_length,
            expected_low=None if expected is None else expected.low,
            watch=watch,
        )

    async def record(
        self, event: Event, version: int, why: str, evidence: Evidence | None = None
    ) -> None:
        """Add to the ledger; a registry that this server may only read costs one log line."""
        server = f"{socket.gethostname()}:{os.getpid()}"
        evidence = {"server": server, **(evidence or {})}
        try:
            await asyncio.to_thread(self._registry.record, event, version, why, evidence)
        except OSError as problem:
            logger.warning("Leadout cannot write to the registry's ledger: %s", problem)

    def _servable(self, version: int) -> Manifest:
        mark = self._registry.bad_mark(version)
        if mark is not None:
            raise SwapRefusedError(f"version {version} is marked as bad: {mark.reason}")
        return self._registry.manifest(version)

    def _watch_for(self, new: Manifest, previous: Manifest) -> ShortfallTest | None:
        # A return to an older version is not watched: its expected acceptance was measured on
        # older traffic, and one roll-back must not lead to a series of them.
        expected = new.promises.get(SOURCE)
        if expected is None or new.version < previous.version or not self._drafts_whole_blocks:
            return None
        return ShortfallTest(expected.low)

    async def _tally(self) -> Tally:
        total = Tally()
        for path in self._served_paths:  # one for each engine
            served = await asyncio.to_thread(read_small, path, ServedRequests)
            # Right after a swap the file still describes the requests before it.
            if served is not None and served.since >= self._counted_since:
                total += served.tally
        return total


class Follower:
    """Keeps a server on the version that the registry's pointer names.

    It acts when the pointer changes: a version that was set by hand stays until then. A refused
    version is not tried again, since versions never change. While the engine sleeps it waits.
    """

    def __init__(self, registry: Registry, drafter: ServingDrafter) -> None:
        self._registry, self._drafter = registry, drafter
        self._followed: Pointer | None = None
        self._refused: set[int] = set()
        self._log = LimitedLog(logging.ERROR)

    async def follow(self) -> None:
        """Run for ever; errors, such as storage that is unreachable, are logged once a minute."""
        await self._drafter.record("started", self._drafter.version, "a server started with it")
        while True:
            try:
                await self.poll()
            except Exception as error:
                self._log(
                    "Leadout could not follow the registry: %s: %s. Serving goes on, and Leadout "
                    "tries again.",
                    type(error).__name__,
                    error,
                )
            await asyncio.sleep(POLL_SECONDS)

    async def poll(self) -> None:
        pointer = await asyncio.to_thread(self._registry.pointer)
        if pointer is None or pointer == self._followed:
            if await self._drafter.roll_back_if_below_expected():
                # Follow the pointer again, also if the version had been set by hand.
                self._followed = None
            return
        self._followed = pointer
        if pointer.version in self._refused:
            return
        try:
            await self._drafter.change_to(pointer.version, pointer.reason)
        except EngineAsleepError:
            self._followed = None  # to be followed once it is awake
        except SwapRefusedError:
            self._refused.add(pointer.version)


def mask_block_hashes(request: Any, mask: bytes) -> None:
    """Make a request find, and leave, only cache blocks of requests with the same mask.

    vLLM's input thread has hashed the prompt already. Hashing it again with a salt would hold up
    the scheduler for 16 ms per 100,000 tokens; a mask on finished hashes separates them as well.
    Later blocks are hashed from unmasked ones, so that a follow-up prompt finds them.
    """
    hasher = request._block_hasher
    if hasher is None:  # nothing is cached
        return
    plain: list[bytes] = list(request.block_hashes)

    def hash_new_blocks(request: Any) -> list[bytes]:
        masked = request.block_hashes
        del plain[len(masked) :]  # vLLM takes blocks back when a streamed prompt is continued
        request.block_hashes = plain
        try:
            new: list[bytes] = hasher(request)
        finally:
            request.block_hashes = masked
        plain.extend(new)
        return _masked(new, mask)

    request.block_hashes[:] = _masked(plain, mask)
    request._block_hasher = hash_new_blocks


def _masked(hashes: list[bytes], mask: bytes) -> list[bytes]:
    if not hashes:
        return []
    size = len(hashes[0])
    table = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, size)  # [hashes, bytes]
    joined = (table ^ np.frombuffer(mask[:size], np.uint8)).tobytes()
    return [joined[start : start + size] for start in range(0, len(joined), size)]


class RolloutMixin:
    """Put before a scheduler class of vLLM: separates the requests after a swap from those before.

    The drafter's keys and values of a text share cache blocks with those of the target. After a
    swap, cached blocks hold the old drafter's: the text stays correct, but the new drafter drafts
    worse from them. vLLM empties its prefix cache only when no request runs. Therefore, from the
    reset that follows a swap, the block hashes of new requests are masked: they cannot find the old
    blocks, which vLLM evicts in time. Running requests keep their blocks.

    Finished requests that arrived after the reset are tallied for `ServingDrafter`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._served_path = served_requests_file(
            settings["vllm_config"], engine_index(settings["vllm_config"])
        )
        self._hash_mask: bytes | None = None
        self._open_requests: dict[str, list[int]] = {}  # by id: steps with a whole block, tokens
        self._tally = Tally()
        self._tally_fail_safe = FailSafe("acceptance watch after swaps", self._open_requests.clear)
        self._start_tally()

    def add_request(self, request: Any) -> None:
        if self._hash_mask is not None:
            mask_block_hashes(request, self._hash_mask)
        if self._tally_fail_safe.is_on:
            self._open_requests[request.request_id] = [0, 0]
        super().add_request(request)  # type: ignore[misc]

    def reset_prefix_cache(self, *arguments: Any, **settings: Any) -> bool:
        is_empty: bool = super().reset_prefix_cache(*arguments, **settings)  # type: ignore[misc]
        self._hash_mask = None if is_empty else os.urandom(MASK_BYTES)
        self._start_tally()
        return is_empty

    def make_spec_decoding_stats(self, *arguments: Any, **settings: Any) -> Any:
        if self._tally_fail_safe.is_on:
            with self._tally_fail_safe:
                self._count_step(**settings)
        return super().make_spec_decoding_stats(*arguments, **settings)  # type: ignore[misc]

    def _free_request(self, request: Any, *arguments: Any, **settings: Any) -> Any:
        steps, tokens = self._open_requests.pop(request.request_id, (0, 0))
        if steps:
            self._tally = self._tally.with_request(steps, tokens)
            is_last = len(self.requests) == 1  # type: ignore[attr-defined]
            if is_last or time.monotonic() - self._last_write >= SECONDS_BETWEEN_WRITES:
                self._write_tally()
        return super()._free_request(request, *arguments, **settings)  # type: ignore[misc]

    def shutdown(self) -> None:
        with suppress(OSError):
            self._served_path.unlink(missing_ok=True)
        super().shutdown()  # type: ignore[misc]

    def _start_tally(self) -> None:
        self._since = time.time()
        self._tally = Tally()
        self._open_requests.clear()  # running requests belong to the drafter before
        self._write_tally()

    def _count_step(
        self,
        *,
        request_id: str,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
    ) -> None:
        """Count steps with whole blocks only, as expected acceptance is measured with those."""
        counts = self._open_requests.get(request_id)
        verified = num_draft_tokens - (num_invalid_spec_tokens or {}).get(request_id, 0)
        if counts is not None and verified == self.num_spec_tokens:  # type: ignore[attr-defined]
            counts[0] += 1
            counts[1] += num_accepted_tokens + 1

    def _write_tally(self) -> None:
        self._last_write = time.monotonic()
        if self._tally_fail_safe.is_on:
            with self._tally_fail_safe:
                write_small(ServedRequests(since=self._since, tally=self._tally), self._served_path)
