"""Clients, and the proxy between them and the replicas, for tests of live servers under faults.

The proxy is a load balancer with health checks: it sends a request to the replica with the fewest
open ones, and to another replica only if the connection was refused, so before a response began.
Whatever else happens to a request is the client's to see.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp import web

from leadout.engine.server import HOST, free_port

REPLICA = "X-Replica"
SECONDS_BETWEEN_HEALTH_CHECKS = 0.5
# Between the requests of a client: servers that restart need a part of a small machine.
PAUSE_SECONDS = 1.0
# A request may wait while its engine is stopped or the machine is slow, but not for ever.
REQUEST_SECONDS = 240.0


@dataclass
class Backend:
    """A replica as the proxy knows it."""

    name: str
    url: str
    is_healthy: bool = False
    is_enabled: bool = True  # a replica that is about to be terminated gets no new requests
    open: int = 0


@dataclass(frozen=True)
class Failure:
    """A request without an answer."""

    replica: str
    began: float  # monotonic time
    ended: float
    what: str


@dataclass
class Seen:
    """What the clients have seen so far."""

    answers: Counter[str] = field(default_factory=Counter)  # by replica
    changed: list[str] = field(default_factory=list)  # answers that are not those of bare vLLM
    failures: list[Failure] = field(default_factory=list)
    longest: float = 0.0  # seconds of one request


class Traffic:
    """A proxy and its clients in a thread, for as long as the `with` block lasts."""

    def __init__(
        self,
        replicas: Mapping[str, str],
        body: Mapping[str, Any],
        expected: Sequence[tuple[list[int], list[int]]],
        clients: int,
    ) -> None:
        """`replicas`: name to URL. `expected`: prompts with the answers of bare vLLM."""
        self.backends = {name: Backend(name, url) for name, url in replicas.items()}
        self.seen = Seen()
        self._body, self._expected, self._clients = dict(body), expected, clients
        self._port = free_port()
        self._places = itertools.cycle(range(len(expected)))
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="chaos-traffic")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Every client gets the answer to its last request."""
        self._is_over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # reported by the thread that waits for this one
            self._error = error

    async def _serve(self) -> None:
        application = web.Application()
        application.router.add_post("/v1/completions", self._forward)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, HOST, self._port).start()
        limit = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        # A kept connection could be closed by a server that ends at the moment of its next use.
        one_request_each = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession(timeout=limit, connector=one_request_each) as session:
            self._session = session
            health = asyncio.create_task(self._check_health())
            try:
                await asyncio.gather(*(self._ask() for _ in range(self._clients)))
            finally:
                health.cancel()
                with suppress(asyncio.CancelledError):
                    await health
                await runner.cleanup()

    async def _check_health(self) -> None:
        limit = aiohttp.ClientTimeout(total=30)
        while True:
            for backend in self.backends.values():
                try:
                    async with self._session.get(f"{backend.url}/health", timeout=limit) as found:
                        backend.is_healthy = found.status == 200
                except TimeoutError:  # slow is not dead
                    pass
                except aiohttp.ClientError:
                    backend.is_healthy = False
            await asyncio.sleep(SECONDS_BETWEEN_HEALTH_CHECKS)

    async def _forward(self, request: web.Request) -> web.Response:
        body = await request.read()
        usable = [each for each in self.backends.values() if each.is_enabled]
        for backend in sorted(usable, key=lambda each: (not each.is_healthy, each.open)):
            headers = {REPLICA: backend.name}
            backend.open += 1
            try:
                async with self._session.post(
                    f"{backend.url}{request.path}",
                    data=body,
                    headers={"Content-Type": "application/json"},
                ) as response:
                    return web.Response(
                        status=response.status,
                        body=await response.read(),
                        headers=headers,
                        content_type=response.content_type,
                    )
            except aiohttp.ClientConnectorError:  # refused: nothing was sent
                backend.is_healthy = False
            except (aiohttp.ClientError, TimeoutError) as error:
                return web.Response(status=502, text=repr(error), headers=headers)
            finally:
                backend.open -= 1
        return web.Response(status=503, text="every replica refused", headers={REPLICA: "none"})

    async def _ask(self) -> None:
        url = f"http://{HOST}:{self._port}/v1/completions"
        while not self._is_over.is_set():
            place = next(self._places)
            prompt, expected = self._expected[place]
            began = time.monotonic()
            async with self._session.post(url, json=self._body | {"prompt": prompt}) as response:
                replica = response.headers.get(REPLICA, "none")
                if response.status != 200:
                    what = f"{response.status}: {(await response.text())[:300]}"
                    ended = time.monotonic()
                    self.seen.failures.append(Failure(replica, began, ended, what))
                    await asyncio.sleep(PAUSE_SECONDS)
                    continue
                ids = (await response.json())["choices"][0]["token_ids"]
            self.seen.longest = max(self.seen.longest, time.monotonic() - began)
            self.seen.answers[replica] += 1
            if ids != expected:
                self.seen.changed.append(f"prompt {place} by {replica}: {ids}")
            await asyncio.sleep(PAUSE_SECONDS)
