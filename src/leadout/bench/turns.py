"""How servers take turns, so that a slow moment of the machine affects all of them alike.

- `slices`: all servers are loaded at the same time, and all but one are stopped (SIGSTOP). Each
  runs for a quarter of a second, in an order that is drawn anew for every pass.
- `waves`: all servers are up, and one after the other is loaded for a whole window.
- `single`: one server at a time is up, because memory does not hold more; each round starts them
  one after the other.

Slices give the narrowest intervals (`results/bench/method.json`), because the two measurements of a
pair are a fraction of a second apart. They need servers that can be stopped at any moment, which is
known of CPU servers only, and not of live control, which measures its own steps.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from leadout.bench.setup import KV_SPACE, SMALL_KV_SPACE, Arm, BenchSetup, Turns, arm_command
from leadout.console import Progress
from leadout.engine.child_process import EngineError
from leadout.engine.load_test import (
    DraftCounters,
    LoadRequest,
    LoadResult,
    RunningClock,
    ServerLoad,
    api_key_of,
    client_session,
    read_counters,
)
from leadout.engine.server import Server

if TYPE_CHECKING:
    from aiohttp import ClientSession

SLICE_SECONDS = 0.25
STARTUP_SECONDS = 1800.0  # large models load slowly; a server that dies is noticed at once
CONSTANT_SECONDS = 600.0  # until all requests of a load decode
_POLL_SECONDS = 0.02
# With all servers stopped, until everything that they have sent is received. Without it a token is
# counted in the wrong window, more often for one server than for another.
_DRAIN_SECONDS = 0.05
_GIB = 2**30
_PROCESS_BYTES = 1.5 * _GIB  # of a server, besides weights and cache
_WEIGHT_FACTOR = 1.2  # activations, and weights that are stored twice while loading


class ArmServer:
    """The running server of an arm, with the clock of the time for which it was allowed to run."""

    def __init__(self, arm: str, server: Server, session: ClientSession) -> None:
        self.label = f"{arm} (log: {server.log})"
        self._server, self._session = server, session
        self._clock = RunningClock()

    def pause(self) -> None:
        self._server.pause()
        self._clock.stop()

    def resume(self) -> None:
        self._clock.start()
        self._server.resume()

    async def run_for(self, seconds: float) -> None:
        """From stopped to stopped."""
        self.resume()
        await asyncio.sleep(seconds)
        self.pause()

    def load(self, request: LoadRequest) -> ServerLoad:
        return ServerLoad(self._session, self._server.url, request, self._clock, self.label)

    def processor_seconds(self) -> float:
        return self._server.processor_seconds()

    async def counters(self) -> DraftCounters:
        return await read_counters(self._session, self._server.url)


@asynccontextmanager
async def started(
    setup: BenchSetup, arms: Sequence[Arm], logs: Path, progress: Progress
) -> AsyncIterator[dict[str, ArmServer]]:
    """Start the servers of the arms one after the other; an idle one takes no processor time."""
    logs.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(client_session(api_key_of(setup.flags)))
        servers = {}
        advance = progress.stage("start servers", len(arms))
        for arm in arms:
            launch = arm_command(arm, setup.target, setup.flags)
            server = stack.enter_context(
                Server(
                    launch.command,
                    log=logs / f"{arm.name}.log",
                    environment=launch.environment,
                    startup_seconds=STARTUP_SECONDS,
                )
            )
            servers[arm.name] = ArmServer(arm.name, server, session)
            advance(note=arm.name)
        yield servers


async def warm_up(
    servers: Mapping[str, ArmServer], request: LoadRequest, progress: Progress
) -> None:
    """Load one server after the other until all batch sizes have run, as requests come and go.

    The first steps of a server take seconds. Nothing is measured.
    """
    advance = progress.stage("warm up servers", len(servers))
    for name, server in servers.items():
        server.resume()
        async with server.load(request) as load:
            await until_constant(server, load)
            enough = 3 * request.concurrency * request.output_tokens
            while load.is_constant and load.received < enough:
                await asyncio.sleep(_POLL_SECONDS)
        advance(note=name)


async def in_slices(
    servers: Mapping[str, ArmServer],
    request: LoadRequest,
    seconds: float,
    order: random.Random,
    rounds: int,
) -> AsyncIterator[dict[str, LoadResult]]:
    """Load all servers at the same time; in every round each runs for `seconds` in short slices.

    The load goes on from round to round, since its first prefills may take longer than a round.
    """
    async with AsyncExitStack() as stack:
        for server in servers.values():
            server.pause()
            stack.callback(server.resume)
        loads = {
            name: await stack.enter_async_context(server.load(request))
            for name, server in servers.items()
        }
        ran = 0.0
        while waiting := [servers[name] for name, load in loads.items() if not load.is_constant]:
            _require_in_time(ran, waiting[0])
            for server in waiting:
                await server.run_for(SLICE_SECONDS)
            ran += SLICE_SECONDS
        before = {name: await _counters_of_stopped(server) for name, server in servers.items()}
        for _ in range(rounds):
            await asyncio.sleep(_DRAIN_SECONDS)
            used = {name: -server.processor_seconds() for name, server in servers.items()}
            for load in loads.values():
                load.open_window()
            for _ in range(max(1, round(seconds / SLICE_SECONDS))):
                for name in order.sample(list(servers), len(servers)):
                    await servers[name].run_for(SLICE_SECONDS)
            await asyncio.sleep(_DRAIN_SECONDS)
            found = {
                name: loads[name].close_window(used[name] + server.processor_seconds())
                for name, server in servers.items()
            }
            for name, server in servers.items():
                counters = await _counters_of_stopped(server)
                drafting = counters.since(before[name])
                found[name] = found[name].model_copy(update={"drafting": drafting})
                before[name] = counters
            yield found


async def _counters_of_stopped(server: ArmServer) -> DraftCounters:
    server.resume()
    try:
        return await server.counters()
    finally:
        server.pause()


async def in_waves(
    servers: Mapping[str, ArmServer],
    request: LoadRequest,
    seconds: float,
    order: random.Random,
    rounds: int,
) -> AsyncIterator[dict[str, LoadResult]]:
    """In every round load one server after the other, each for `seconds`."""
    for _ in range(rounds):
        found = {}
        for name in order.sample(list(servers), len(servers)):
            server = servers[name]
            server.resume()
            async with server.load(request) as load:
                await until_constant(server, load)
                before = await server.counters()
                used = -server.processor_seconds()
                load.open_window()
                await asyncio.sleep(seconds)
                result = load.close_window(used + server.processor_seconds())
                drafting = (await server.counters()).since(before)
                found[name] = result.model_copy(update={"drafting": drafting})
        yield {name: found[name] for name in servers}


async def until_constant(server: ArmServer, load: ServerLoad) -> None:
    waited = 0.0
    while not load.is_constant:
        _require_in_time(waited, server)
        await asyncio.sleep(_POLL_SECONDS)
        waited += _POLL_SECONDS


def _require_in_time(seconds: float, server: ArmServer) -> None:
    if seconds > CONSTANT_SECONDS:
        raise EngineError(
            f"{server.label}: not all requests had a first token after {CONSTANT_SECONDS:.0f} s. "
            "See the server's log, or lower --concurrency."
        )


def choose_turns(arms: Sequence[Arm], folders: Sequence[Path], on_cpu: bool) -> Turns:
    """Together if the memory that is free holds all servers, otherwise one at a time.

    `folders` are those of the target and of the drafters. Weights that are not downloaded yet have
    an unknown size, so their servers are started one at a time.
    """
    sizes = [_weight_bytes(folder) for folder in folders]
    if not all(sizes):
        return "single"
    weights = sum(sizes)
    if not on_cpu:
        import torch

        if not torch.cuda.is_available():
            return "single"
        free, _ = torch.cuda.mem_get_info()
        # A cache that is divided holds fewer requests; a tenth of the memory is left to each.
        fits = len(arms) * (_WEIGHT_FACTOR * weights + 0.1 * free) < free
        return "waves" if fits else "single"
    cache = float(os.environ.get(KV_SPACE, SMALL_KV_SPACE)) * _GIB
    needed = len(arms) * (_WEIGHT_FACTOR * weights + cache + _PROCESS_BYTES)
    if needed >= _available_bytes():
        return "single"
    # The clock of live control would count the time for which its server is stopped.
    return "waves" if any(arm.kind == "live" for arm in arms) else "slices"


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
