"""The drafter version that a server runs: swap it, compare its acceptance, roll it back.

`ServingDrafter` has the states and transitions. All changes go through it, one at a time. It
compares the acceptance length of requests since the swap with what was expected of the version, and
gives the version up if they fall short.

`leadout.engine.follower` asks it for the version that the registry's pointer names. The scheduler's
part is in `leadout.engine.served_requests`, what servers tell each other in
`leadout.engine.watch_record`.
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
from functools import partial
from pathlib import Path
from typing import Any, Literal

from leadout.control.rollback import MAX_CHECKS, Acceptance, Expectation, ShortfallTest, Tally
from leadout.engine.capture_store import SOURCE
from leadout.engine.counters import read_small
from leadout.engine.fail_safe import Backoff, LimitedLog
from leadout.engine.hot_swap import (
    EngineAsleepError,
    NotNowError,
    SwapFailedError,
    Swapped,
    Swapper,
    SwapRefusedError,
    is_final,
)
from leadout.engine.served_requests import ServedRequests
from leadout.engine.watch_record import (
    COOL_DOWN_SECONDS,
    WatchRecord,
    control_of,
    is_control_coming,
    read_records,
    vote_of,
    write_record,
)
from leadout.errors import LeadoutError
from leadout.registry import Event, Evidence, Manifest, Registry

logger = logging.getLogger("vllm.leadout")

SECONDS_BETWEEN_RECORDS = 60.0
SECONDS_BETWEEN_READS = 20.0  # of the other servers' records, while their requests are waited for
# So many runs in a row that end in a crash soon after their start are held against the version.
MAX_CRASHED_RUNS = 3
CRASH_SECONDS = 600.0

State = Literal["serving", "staging", "watching", "rolling_back"]
WatchState = Literal["off", "watching", "passed", "failed"]


@dataclass(frozen=True)
class DrafterReport:
    """The answer to `GET /leadout/drafter`."""

    version: int
    fingerprint: str
    state: State
    since: str  # UTC
    requests: int  # arrived since then and finished
    requests_by_client: int  # those of them that count with the limit for clients
    steps: int
    acceptance_length: float | None
    expected_low: float | None  # lower end of the interval that was measured before publishing
    watch: WatchState  # whether the acceptance length is compared with it


@dataclass(frozen=True)
class _GivenUp:
    """A version that this server leaves, and wants all servers of the registry to leave."""

    record: WatchRecord
    evidence: dict[str, float]


class ServingDrafter:
    """The version that this server runs.

    | state        | event                                       | next state                      |
    | ------------ | ------------------------------------------- | ------------------------------- |
    | any          | the pointer names another version, or an    | staging                         |
    |              | administrator asks for one                  |                                 |
    | staging      | swapped, acceptance is to be compared       | watching                        |
    | staging      | swapped, nothing is to be compared          | serving                         |
    | staging      | never: hash, shape, target, mark            | as before; not tried again      |
    | staging      | not now: storage, memory, sleeping engine   | as before; tried again later    |
    | watching     | all checks are made                         | serving                         |
    | watching     | acceptance below the expected one, or       | rolling back                    |
    |              | repeated crashes                            |                                 |
    | rolling back | no other server compares the version, or    | serving an older version; this  |
    |              | another one agrees                          | one is marked, the pointer moves|
    | rolling back | others still compare it, or the registry    | rolling back; this server alone |
    |              | cannot be written                           | has left it, and asks again     |
    | rolling back | the others have found nothing, and the      | serving; the pointer is         |
    |              | cool-down is over                           | followed again                  |
    | any          | restart                                     | as in this server's record      |
    """

    def __init__(
        self,
        registry: Registry,
        manifest: Manifest,
        swapper: Swapper,
        served_paths: Sequence[Path],
        *,
        drafts_whole_blocks: bool,
        server: str | None = None,
    ) -> None:
        """`manifest` is that of the version that the server started with.

        `drafts_whole_blocks`: the server drafts as many tokens as the drafter can, which is how
        expected acceptance is measured. `server` names this server in the registry, the same after
        a restart.
        """
        self._registry, self._manifest = registry, manifest
        self._swapper, self._served_paths = swapper, served_paths
        self._drafts_whole_blocks = drafts_whole_blocks
        self._server = server or f"{socket.gethostname()}:{os.getpid()}"
        self._since = time.time()
        self._counted_since = 0.0  # before the first swap every request counts
        self._is_staging = self._is_mixed = False
        self._watch: ShortfallTest | None = None
        self._record: WatchRecord | None = None  # of the version in service, if it is compared
        self._saved: WatchRecord | None = None  # as it is in the registry, with all requests
        self._recorded_at = -SECONDS_BETWEEN_RECORDS
        self._read_due = 0.0  # by the monotonic clock
        self._given_up: _GivenUp | None = None
        self._retry = Backoff()
        self._change = asyncio.Lock()
        self._log, self._record_log = LimitedLog(logging.ERROR), LimitedLog(logging.WARNING)

    @property
    def version(self) -> int:
        return self._manifest.version

    @property
    def state(self) -> State:
        if self._is_staging:
            return "staging"
        if self._watch is not None and not self._watch.is_finished:
            return "watching"  # perhaps of a newer version than the one that was given up
        return "serving" if self._given_up is None else "rolling_back"

    def avoids(self, version: int) -> bool:
        """Whether this server has left a version that the pointer may still name."""
        return self._given_up is not None and self._given_up.record.version == version

    async def start(self) -> None:
        """Continue from this server's record what it did before a restart; may be tried again."""
        with suppress(LeadoutError, OSError):  # servers may have permission to read only
            await asyncio.to_thread(self._registry.recover)
        manifest = self._manifest
        if self._is_in_use(manifest):
            return
        records = await asyncio.to_thread(read_records, self._registry, manifest.version)
        if self._is_in_use(manifest):
            return
        own = next((record for record in records if record.server == self._server), None)
        if own is not None and own.found == "failed":
            self._given_up = _GivenUp(own, {})
            return
        expected = self._expected(manifest)
        if expected is not None and own is not None and own.found == "passed":
            # Others must still see that this server is content with the version.
            self._record, self._watch = own, ShortfallTest(expected, own.before, MAX_CHECKS)
            await self._keep_record(is_due=True)
            return
        if expected is None or any(record.found == "passed" for record in records):
            return
        if await asyncio.to_thread(self._is_after_a_roll_back) or self._is_in_use(manifest):
            return
        own = own or WatchRecord(server=self._server, version=manifest.version, found="watching")
        if own.runs >= MAX_CRASHED_RUNS:
            self._give_up(own, f"the server ended {own.runs} times in a row soon after its start")
            return
        self._record = own.model_copy(update={"runs": own.runs + 1})
        self._watch = ShortfallTest(expected, own.before, own.checks)
        await self._keep_record(is_due=True)

    def _is_in_use(self, manifest: Manifest) -> bool:
        """Whether the version that the server started with was swapped or taken up meanwhile."""
        is_known = self._record is not None or self._given_up is not None
        return is_known or self._manifest is not manifest

    def stop(self) -> None:
        """The server ends because it was told to; to be called synchronously, at its end."""
        if self._saved is not None and not self._swapper.has_failed():
            with suppress(OSError):
                write_record(self._registry, self._saved.model_copy(update={"runs": 0}))

    async def change_to(self, version: int, why: str) -> Swapped | None:
        """Swap to a version; None if it is served already. Nothing has changed after

        - SwapRefusedError: the version can never be served by this server;
        - NotNowError: trying again later may help.
        """
        # A client that disconnects must not interrupt a swap.
        return await asyncio.shield(self._change_to(version, why))

    async def _change_to(self, version: int, why: str) -> Swapped | None:
        async with self._change:
            previous = self._manifest
            if version == previous.version and not self._is_mixed:
                return None
            before = (await self._served()).tally
            self._is_staging = True
            try:
                manifest = await asyncio.to_thread(self._servable, version)
                swapped = await self._swapper.swap(version)
            except EngineAsleepError:  # nothing is wrong with the version
                raise
            except (LeadoutError, OSError) as problem:
                self._is_mixed = self._is_mixed or isinstance(problem, SwapFailedError)
                if is_final(problem) or isinstance(problem, SwapFailedError):
                    logger.error("Leadout refuses version %d of the drafter: %s", version, problem)
                    await self.record("refused", version, str(problem))
                if isinstance(problem, SwapFailedError | NotNowError):
                    raise
                error = SwapRefusedError if is_final(problem) else NotNowError
                raise error(str(problem)) from None
            finally:
                self._is_staging = False
            self._take_over(manifest, previous, swapped, before)
        logger.info(
            "Leadout serves version %d of the drafter instead of %d; the swap paused serving for "
            "%.0f ms",
            version,
            previous.version,
            1000 * swapped.pause_seconds,
        )
        facts = {name: value for name, value in asdict(swapped).items() if name != "at"}
        await self.record("swapped", version, why, {"from": previous.version, **facts})
        await self._keep_record(is_due=True)
        return swapped

    def _take_over(
        self, manifest: Manifest, previous: Manifest, swapped: Swapped, before: Tally
    ) -> None:
        self._manifest, self._is_mixed = manifest, False
        self._since = self._counted_since = swapped.at
        self._watch = self._record = self._saved = None
        self._read_due = 0.0
        if self.avoids(manifest.version):  # an administrator wants it nevertheless
            self._given_up = None
        # A return to an older version is not watched: its expected acceptance was measured on
        # older traffic, and one roll-back must not lead to a series of them.
        expected = self._expected(manifest)
        if expected is not None and manifest.version > previous.version:
            is_parent = previous.version == manifest.parent
            self._watch = ShortfallTest(expected, before if is_parent else None)
            self._record = WatchRecord(
                server=self._server,
                version=manifest.version,
                found="watching",
                before=self._watch.before,
                runs=1,
            )

    async def advance(self) -> None:
        """To be called every few seconds: compare, roll back, and keep the record."""
        await self._swapper.finish()
        if self.state == "watching":
            await self._compare()
        if self._given_up is not None and self._retry.is_due:
            await self._roll_back(self._given_up)
        await self._keep_record()

    async def _compare(self) -> None:
        watch, record = self._watch, self._record
        assert watch is not None
        assert record is not None
        served = await self._served()
        tally, by_client = record.tally + served.tally, record.by_client + served.by_client
        if not watch.is_due(tally) or time.monotonic() < self._read_due:
            return
        records: list[WatchRecord] | None = None
        with suppress(OSError):
            records = await asyncio.to_thread(read_records, self._registry, record.version)
        if watch is not self._watch:  # swapped meanwhile
            return
        # Servers that have left the version are the control for those that still serve it.
        others = [each for each in records or [] if each.server != self._server]
        parent = self._manifest.parent
        if watch.needs_control and (records is None or is_control_coming(others, parent)):
            self._read_due = time.monotonic() + SECONDS_BETWEEN_READS
            return
        shortfall = watch.check(tally, by_client, control_of(others, parent))
        if shortfall is not None:
            self._give_up(record, str(shortfall), asdict(shortfall))

    def _give_up(self, record: WatchRecord, why: str, evidence: Any = None) -> None:
        logger.warning("Leadout rolls back version %d of the drafter: %s", record.version, why)
        now = time.time()
        failed = record.model_copy(update={"found": "failed", "why": why, "failed_at": now})
        self._watch = self._record = self._saved = None
        self._given_up = _GivenUp(failed, evidence or {})
        self._retry.reset()

    async def _roll_back(self, given_up: _GivenUp) -> None:
        """One attempt; whatever fails is tried again later.

        This server leaves the version first: storage that cannot be written must not keep it there.
        """
        version, why = given_up.record.version, given_up.record.why
        problems: list[str] = []
        is_written, vote = False, "waiting"
        if self.version == version:
            try:
                await self._leave(version, f"rolled back from version {version}: {why}")
            except (LeadoutError, OSError) as problem:
                problems.append(str(problem))
        record = given_up.record
        if self.version != version:
            control = (await self._served()).tally
            record = record.model_copy(update={"control": control, "control_version": self.version})
        try:
            await asyncio.to_thread(write_record, self._registry, record)
        except OSError as problem:
            problems.append(str(problem))
        try:
            records = await asyncio.to_thread(read_records, self._registry, version)
            vote = vote_of(records, self._server)
            if vote == "agreed":
                pointer = await asyncio.to_thread(self._registry.roll_back, version, why)
                # Once, also if the server that moved the pointer was killed before its entry.
                evidence: dict[str, float | int | str | bool] = {"server": self._server}
                evidence |= {} if pointer is None else {"to": pointer.version}
                evidence |= given_up.evidence
                write = partial(self._registry.record, "rolled_back", version, why, once=True)
                await asyncio.to_thread(write, evidence=evidence)
                is_written = True
        except (LeadoutError, OSError) as problem:
            problems.append(str(problem))
        if problems:
            self._log(
                "Leadout could not roll version %d of the drafter back everywhere: %s. It tries "
                "again.",
                version,
                problems[0],
            )
        if self._given_up is not given_up:  # an administrator has changed the version meanwhile
            return
        is_cool = time.time() - given_up.record.failed_at > COOL_DOWN_SECONDS
        if self.version != version and (is_written or (vote == "outvoted" and is_cool)):
            self._given_up = None
        else:
            self._retry.failed()

    async def _leave(self, version: int, why: str) -> None:
        pointer = await asyncio.to_thread(self._registry.pointer)
        if pointer is not None and pointer.version != version:
            with suppress(SwapRefusedError):  # this server can never run it: an ancestor instead
                await self.change_to(pointer.version, why)
                return
        ancestor = await asyncio.to_thread(self._registry.good_ancestor, version)
        await self.change_to(ancestor, why)

    async def report(self) -> DrafterReport:
        served, expected = await self._served(), self._manifest.promises.get(SOURCE)
        tally = served.tally
        watch: WatchState = "off" if self._given_up is None else "failed"
        if self._watch is not None:
            watch = "passed" if self._watch.is_finished else "watching"
        return DrafterReport(
            version=self.version,
            fingerprint=self._manifest.fingerprint,
            state=self.state,
            since=datetime.fromtimestamp(self._since, UTC).isoformat(timespec="milliseconds"),
            requests=tally.requests,
            requests_by_client=served.by_client.requests,
            steps=tally.steps,
            acceptance_length=tally.acceptance_length,
            expected_low=None if expected is None else expected.low,
            watch=watch,
        )

    async def record(
        self, event: Event, version: int, why: str, evidence: Evidence | None = None
    ) -> None:
        """Add to the ledger; a registry that this server may only read costs one log line."""
        evidence = {"server": self._server, **(evidence or {})}
        try:
            await asyncio.to_thread(self._registry.record, event, version, why, evidence)
        except OSError as problem:
            logger.warning("Leadout cannot write to the registry's ledger: %s", problem)

    async def _keep_record(self, is_due: bool = False) -> None:
        record, watch = self._record, self._watch
        is_due = is_due or time.monotonic() - self._recorded_at >= SECONDS_BETWEEN_RECORDS
        if record is None or watch is None:
            return
        if watch.is_finished and record.found == "watching":
            record = self._record = record.model_copy(update={"found": "passed"})
            is_due = True
        if not is_due:
            return
        self._recorded_at = time.monotonic()
        if record.runs and time.time() - self._since > CRASH_SECONDS:
            record = self._record = record.model_copy(update={"runs": 0})
        served = await self._served()
        if record is not self._record:  # swapped meanwhile
            return
        so_far = {
            "tally": record.tally + served.tally,
            "by_client": record.by_client + served.by_client,
            "checks": watch.checks,
        }
        try:
            self._saved = record.model_copy(update=so_far)
            await asyncio.to_thread(write_record, self._registry, self._saved)
        except OSError as problem:
            self._record_log("Leadout cannot record its comparison in the registry: %s", problem)

    def _servable(self, version: int) -> Manifest:
        mark = self._registry.bad_mark(version)
        if mark is not None:
            raise SwapRefusedError(f"version {version} is marked as bad: {mark.reason}")
        return self._registry.manifest(version)

    def _expected(self, manifest: Manifest) -> Expectation | None:
        """The acceptance to compare with, if there is any."""
        expected = manifest.promises.get(SOURCE)
        if expected is None or not self._drafts_whole_blocks:
            return None
        per_request, before = expected.per_request, expected.before
        if per_request is None:
            return Expectation(Acceptance(expected.acceptance_length, expected.low))
        return Expectation(
            Acceptance(**per_request.model_dump()),
            None if before is None else Acceptance(**before.model_dump()),
        )

    def _is_after_a_roll_back(self) -> bool:
        later = (version for version in self._registry.versions() if version > self.version)
        return any(self._registry.bad_mark(version) is not None for version in later)

    async def _served(self) -> ServedRequests:
        """Requests that arrived since the swap, or since the start of the server."""
        tally, by_client = Tally(), Tally()
        for path in self._served_paths:  # one for each engine
            served = await asyncio.to_thread(read_small, path, ServedRequests)
            # Right after a swap the file still describes the requests before it.
            if served is not None and served.since >= self._counted_since:
                tally, by_client = tally + served.tally, by_client + served.by_client
        return ServedRequests(since=self._counted_since, tally=tally, by_client=by_client)
