"""The loads of a bench: all servers at the same time in slices, or one after the other in waves.

- `in_slices`: each server runs for a quarter of a second, in an order that is drawn anew for every
  pass.
- `in_waves`: each server is loaded for a whole window; also the way of a single server.

Slices give the narrowest intervals (`results/bench/method.json`), because the two measurements of a
pair are a fraction of a second apart. Live control learns from no step in which it was stopped, so
its servers are measured in waves. `leadout.engine.server_turns` starts the servers and chooses
between the two.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack

from leadout.console import Progress
from leadout.engine.child_process import EngineError
from leadout.engine.load_test import DraftCounters, LoadRequest, LoadResult, ServerLoad
from leadout.engine.server_turns import RunningServer

SLICE_SECONDS = 0.25
CONSTANT_SECONDS = 600.0  # until all requests of a load decode
_POLL_SECONDS = 0.02
# With all servers stopped, until everything that they have sent is received. Without it a token is
# counted in the wrong window, more often for one server than for another.
_DRAIN_SECONDS = 0.05


async def warm_up(
    servers: Mapping[str, RunningServer], request: LoadRequest, progress: Progress
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
    servers: Mapping[str, RunningServer],
    request: LoadRequest,
    seconds: float,
    order: random.Random,
    rounds: int,
    slice_seconds: float = SLICE_SECONDS,
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
                await server.run_for(slice_seconds)
            ran += slice_seconds
        before = {name: await _counters_of_stopped(server) for name, server in servers.items()}
        for _ in range(rounds):
            await asyncio.sleep(_DRAIN_SECONDS)
            used = {name: -server.processor_seconds() for name, server in servers.items()}
            for load in loads.values():
                load.open_window()
            for _ in range(max(1, round(seconds / slice_seconds))):
                for name in order.sample(list(servers), len(servers)):
                    await servers[name].run_for(slice_seconds)
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


async def _counters_of_stopped(server: RunningServer) -> DraftCounters:
    server.resume()
    try:
        return await server.counters()
    finally:
        server.pause()


async def in_waves(
    servers: Mapping[str, RunningServer],
    requests: Sequence[LoadRequest],
    seconds: float,
    order: random.Random,
) -> AsyncIterator[dict[str, LoadResult]]:
    """Load one server after the other, each for `seconds`; a round for each of `requests`.

    The load starts again in every round, so rounds need requests with different prompts.
    """
    for request in requests:
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


async def until_constant(server: RunningServer, load: ServerLoad) -> None:
    waited = 0.0
    while not load.is_constant:
        _require_in_time(waited, server)
        await asyncio.sleep(_POLL_SECONDS)
        waited += _POLL_SECONDS


def _require_in_time(seconds: float, server: RunningServer) -> None:
    if seconds > CONSTANT_SECONDS:
        raise EngineError(
            f"{server.label}: not all requests had a first token after {CONSTANT_SECONDS:.0f} s. "
            "See the server's log, or lower --concurrency."
        )
