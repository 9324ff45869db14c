"""A constant load, timed by a clock that stops with the server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from leadout.engine.child_process import EngineError
from leadout.engine.load_test import (
    LoadRequest,
    RunningClock,
    ServerLoad,
    api_key_of,
    client_session,
    parse_counters,
)

STEP = 0.01


@dataclass
class StreamingServer:
    """Stands for a vLLM server: two tokens per chunk, one chunk per step, errors on demand.

    A step begins once the clients have received the chunks before, so that the time between two
    chunks is never less than a step, however late this process runs.
    """

    fail_with: int | None = None
    tokens_short: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)  # of the clients
    load: ServerLoad | None = None
    sent: int = 0  # tokens

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        assert request.transport is not None
        self.ports.append(request.transport.get_extra_info("peername")[1])
        if self.fail_with is not None:
            return web.Response(status=self.fail_with, text="prompt too long")
        response = web.StreamResponse()
        await response.prepare(request)
        written, wanted = 0, body["max_tokens"] - self.tokens_short
        while written < wanted:
            await asyncio.sleep(STEP)
            new = min(wanted - written, 2)
            written, self.sent = written + new, self.sent + new
            usage = {"prompt_tokens": 7, "completion_tokens": written}
            await response.write(b"data: " + json.dumps({"usage": usage}).encode() + b"\n\n")
            assert self.load is not None
            while self.load.received < self.sent and request.transport is not None:
                await asyncio.sleep(STEP / 10)
        await response.write(b"data: [DONE]\n\n")
        return response

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def loaded(
    server: StreamingServer,
    request: LoadRequest,
    during: Callable[[ServerLoad, RunningClock], Awaitable[None]],
) -> None:
    async def main() -> None:
        clock = RunningClock()
        clock.start()
        async with (
            server.running() as url,
            client_session() as session,
            ServerLoad(session, url, request, clock, "some arm") as load,
        ):
            server.load = load
            while not load.is_constant:
                await asyncio.sleep(STEP)
            await during(load, clock)

    asyncio.run(asyncio.wait_for(main(), 600))


REQUEST = LoadRequest(prompts=("a", "b", "c"), concurrency=2, output_tokens=8)


def test_a_window_counts_tokens_requests_and_times() -> None:
    server = StreamingServer()

    async def during(load: ServerLoad, clock: RunningClock) -> None:
        outside = clock.seconds
        load.open_window()
        opened, before = clock.seconds, load.received
        asked = len(server.seen)
        while len(server.seen) < asked + 4:  # each after the end of another one
            await asyncio.sleep(STEP)
        closing, after = clock.seconds, load.received
        found = load.close_window(processor_seconds=1.5)
        assert closing - opened <= found.seconds <= clock.seconds - outside
        assert found.processor_seconds == 1.5
        assert found.requests >= 2
        assert found.output_tokens == after - before > 8
        assert found.prompt_tokens == 7 * len(found.ttfts)
        # At most two tokens per step.
        assert min(found.tpots) >= 0.49 * STEP
        assert found.itl_p99 >= found.itl_median >= 0.98 * STEP

    loaded(server, REQUEST, during)
    assert all(body["temperature"] == 0 and body["ignore_eos"] for body in server.seen)
    prompts = [body["messages"][0]["content"] for body in server.seen]
    assert prompts[:5] == ["a", "b", "c", "a", "b"]


def test_first_requests_are_of_different_length() -> None:
    request = REQUEST.model_copy(update={"concurrency": 4})
    assert [request.first_length(client) for client in range(4)] == [1, 3, 5, 7]
    server = StreamingServer()

    async def during(load: ServerLoad, clock: RunningClock) -> None:
        while len(server.seen) < 6:
            await asyncio.sleep(STEP)

    loaded(server, request, during)
    lengths = [body["max_tokens"] for body in server.seen]
    assert sorted(lengths[:4]) == [1, 3, 5, 7]
    assert set(lengths[4:]) == {8}


def test_no_request_uses_a_connection_that_was_idle() -> None:
    """A server that was stopped meanwhile may close it while the request is being sent."""
    server = StreamingServer()

    async def during(load: ServerLoad, clock: RunningClock) -> None:
        while len(server.seen) < 6:
            await asyncio.sleep(STEP)

    loaded(server, REQUEST, during)
    assert len(set(server.ports)) == len(server.ports)


def test_the_clock_counts_only_while_the_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = RunningClock()
    now += 2
    assert clock.seconds == 0
    clock.start()
    now += 1
    clock.start()
    now += 3
    assert clock.seconds == 4
    clock.stop()
    now += 8
    assert clock.seconds == 4
    clock.start()
    now += 16
    assert clock.seconds == 20


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (StreamingServer(fail_with=400), r"some arm: The server answered 400: prompt too long"),
        (StreamingServer(tokens_short=1), r"has 3 tokens, expected 4: increase --max-model-len"),
    ],
)
def test_a_request_that_fails_ends_the_load(server: StreamingServer, message: str) -> None:
    request = REQUEST.model_copy(update={"concurrency": 1})

    async def during(load: ServerLoad, clock: RunningClock) -> None:
        while load.is_constant:
            await asyncio.sleep(STEP)

    with pytest.raises(EngineError, match=message):
        loaded(server, request, during)


def test_responses_may_end_earlier_at_the_end_of_text() -> None:
    server = StreamingServer(tokens_short=1)
    request = REQUEST.model_copy(update={"stop_at_end_of_text": True})

    async def during(load: ServerLoad, clock: RunningClock) -> None:
        while len(server.seen) < 6:
            await asyncio.sleep(STEP)
        assert load.is_constant

    loaded(server, request, during)
    assert not any(body["ignore_eos"] for body in server.seen)


def test_a_window_without_tokens_is_an_error() -> None:
    async def during(load: ServerLoad, clock: RunningClock) -> None:
        load.open_window()
        load.close_window(0.0)

    with pytest.raises(EngineError, match=r"0 tokens in \d+\.\d s are too few"):
        loaded(StreamingServer(), REQUEST, during)


METRICS = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 4.0
vllm:spec_decode_num_drafts_total{engine="1"} 6.0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} 30.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 15.0
vllm:spec_decode_num_accepted_tokens_created{engine="0"} 1.7e9
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 10.0
"""


def test_acceptance_length_comes_from_the_servers_counters() -> None:
    none, some = parse_counters(""), parse_counters(METRICS)
    found = some.since(none)
    assert found is not None
    assert (found.drafts, found.draft_tokens, found.accepted) == (10, 30, 15)
    assert found.by_position == [1.0, 0.5]
    assert found.acceptance_length == 2.5
    assert some.since(some) is None  # nothing was drafted in between


def test_the_servers_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert api_key_of(["--max-num-seqs", "8"]) is None
    assert api_key_of(["--api-key", "one", "--port", "1"]) == "one"
    assert api_key_of(["--api-key=two"]) == "two"
    assert api_key_of(["--api-key", "c2VjcmV0=="]) == "c2VjcmV0=="
    assert api_key_of(["--api_key=c2VjcmV0=="]) == "c2VjcmV0=="
    assert api_key_of(["--api-key", "one", "--served-model-name=--api-key", "--api-key=2"]) == "2"
    assert api_key_of(["--api-key"]) is None
    monkeypatch.setenv("VLLM_API_KEY", "three")
    assert api_key_of([]) == "three"
