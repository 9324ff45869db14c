"""A constant load on a server: streamed requests, timed by a clock that stops with the server.

`ServerLoad` keeps a fixed number of requests in flight: when one ends, the next prompt is sent.
`BatchLoad` sends a batch of requests at once, for servers that record their own steps.
vLLM's own generator (`vllm bench serve`) sends a fixed number of requests by the wall clock. Here
servers take turns and are stopped between them (`server_turns`), so every time is taken from a
`RunningClock`, which counts only while its server runs, and throughput is counted over a window in
which the load is constant.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, Field, ValidationError

from leadout.engine.child_process import EngineError, Message
from leadout.errors import shortened, shown
from leadout.files import first_problem
from leadout.stats import percentile

if TYPE_CHECKING:
    from aiohttp import ClientSession

_DATA = b"data: "
_DONE = b"[DONE]"
_COUNTERS = "vllm:spec_decode_num_"


class Usage(BaseModel):
    """Tokens of a request so far."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)


class _Chunk(BaseModel):
    """A part of a streamed response, as far as it is needed."""

    error: Any = None
    usage: Usage | None = None


def usage_in(data: bytes) -> Usage:
    """The counts in a part of a streamed response."""
    try:
        chunk = _Chunk.model_validate_json(data)
    except ValidationError as problem:
        raise EngineError(
            f"The server's stream is not as vLLM writes it ({first_problem(problem)}). Check that "
            "the address is that of a vLLM server."
        ) from None
    if chunk.error is not None:
        raise EngineError(f"The server reported {shown(chunk.error)}.")
    if chunk.usage is None:
        raise EngineError(
            "The server's stream has no counts of tokens, which vLLM sends on request. Check that "
            "the address is that of a vLLM server."
        )
    return chunk.usage


def client_session(api_key: str | None = None) -> ClientSession:
    """For any number of concurrent streams of any length.

    Every request has a connection of its own: a server that was stopped for a while closes those
    that were idle as soon as it runs again, possibly while the next request is being sent.
    """
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
    )


def api_key_of(flags: Sequence[str]) -> str | None:
    """The key that a server asks for: of its flags, or of its environment."""
    return flag_value(flags, "--api-key") or os.environ.get("VLLM_API_KEY")


def flag_value(flags: Sequence[str], *names: str) -> str | None:
    """The value of a flag with any of these names; None without it.

    As vLLM reads it: also written as `--name=value` or with underscores, and the last one counts.
    """
    found = None
    for place, flag in enumerate(flags):
        written, equals, value = flag.partition("=")
        if written.replace("_", "-") in names:
            found = value if equals else next(iter(flags[place + 1 :]), None)
    return found


class LoadRequest(Message):
    """Greedy chat requests, `concurrency` of them at any time, with these prompts in this order."""

    prompts: tuple[str, ...]  # starts again at the end
    concurrency: int
    output_tokens: int  # of every request, or at most as many with `stop_at_end_of_text`
    stop_at_end_of_text: bool = False

    def first_length(self, client: int) -> int:
        """Output tokens of a client's first request.

        Spread evenly, as if the load had always been there: otherwise all requests would start and
        end in the same step, and a window would have none or all of their prefills.
        """
        return max(1, round(self.output_tokens * (client + 0.5) / self.concurrency))


class Drafting(Message):
    """The server's speculation counters over the load; steps without drafts do not count."""

    drafts: int  # blocks, one per request and step
    draft_tokens: int
    accepted: int
    by_position: list[float]  # share of blocks whose draft at this position was accepted

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.drafts


class LoadResult(Message):
    """What one server did in a window; seconds are those in which it ran."""

    seconds: float
    processor_seconds: float  # of all its processes
    requests: int  # that ended
    prompt_tokens: int  # of the requests whose first token came
    output_tokens: int
    ttfts: list[float]  # time to first token
    tpots: list[float]  # time per output token, by request, for its tokens in the window
    itl_median: float  # between two chunks of a stream, which hold several tokens with drafts
    itl_p99: float
    drafting: Drafting | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def processor_seconds_per_token(self) -> float:
        return self.processor_seconds / self.output_tokens


class RunningClock:
    """Seconds for which a server was allowed to run."""

    def __init__(self) -> None:
        self._total = 0.0
        self._since: float | None = None

    def start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        self._total = self.seconds
        self._since = None

    @property
    def seconds(self) -> float:
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._total + running


@dataclass(slots=True)
class _Stream:
    """One request: when it was sent, and what has come back."""

    sent: float
    last: float | None = None  # arrival of the last chunk
    tokens: int = 0
    window_seconds: float = 0.0
    window_tokens: int = 0


@dataclass(slots=True)
class _Window:
    started: float
    tokens: int = 0
    prompt_tokens: int = 0
    requests: int = 0
    ttfts: list[float] = field(default_factory=list)
    tpots: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def end_of(self, stream: _Stream) -> None:
        if stream.window_tokens:
            self.tpots.append(stream.window_seconds / stream.window_tokens)


class ServerLoad:
    """`async with ServerLoad(...) as load:` keeps the server busy until the block ends."""

    def __init__(
        self,
        session: ClientSession,
        url: str,
        request: LoadRequest,
        clock: RunningClock,
        label: str = "",
    ) -> None:
        """`label` names the server in errors."""
        self._session, self._url, self._request, self._clock = session, url, request, clock
        self._label = label or url
        self._prompts: Iterator[str] = cycle(request.prompts)
        self._streams: dict[int, _Stream] = {}  # by client
        self._answered: set[int] = set()  # clients that have received a token
        self._clients: list[asyncio.Task[None]] = []
        self._window: _Window | None = None
        self.received = 0  # tokens since the beginning

    async def __aenter__(self) -> Self:
        self._clients = [
            asyncio.create_task(self._send_always(client))
            for client in range(self._request.concurrency)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await _cancel(self._clients)

    @property
    def is_constant(self) -> bool:
        """Whether every client has received a token; raises the first error of a request."""
        _require_no_error(self._clients, self._label)
        return len(self._answered) == self._request.concurrency

    def open_window(self) -> None:
        self._window = _Window(started=self._clock.seconds)
        for stream in self._streams.values():
            stream.window_seconds, stream.window_tokens = 0.0, 0

    def close_window(self, processor_seconds: float) -> LoadResult:
        """What was measured, without the server's draft counters."""
        _require_no_error(self._clients, self._label)
        window, self._window = self._window, None
        assert window is not None
        for stream in self._streams.values():
            window.end_of(stream)
        seconds = self._clock.seconds - window.started
        if not window.gaps:
            raise EngineError(
                f"{self._label}: {window.tokens} tokens in {seconds:.1f} s are too few to measure "
                "the speed; increase --seconds."
            )
        return LoadResult(
            seconds=seconds,
            processor_seconds=processor_seconds,
            requests=window.requests,
            prompt_tokens=window.prompt_tokens,
            output_tokens=window.tokens,
            ttfts=window.ttfts,
            tpots=window.tpots,
            itl_median=percentile(window.gaps, 50),
            itl_p99=percentile(window.gaps, 99),
        )

    async def _send_always(self, client: int) -> None:
        tokens = self._request.first_length(client)
        while True:
            await self._send(client, next(self._prompts), tokens)
            tokens = self._request.output_tokens

    async def _send(self, client: int, prompt: str, tokens: int) -> None:
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": not self._request.stop_at_end_of_text,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        stream = self._streams[client] = _Stream(sent=self._clock.seconds)
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise EngineError(
                    f"The server answered {response.status}: {(await response.text())[:500]} If a "
                    "prompt is too long, increase --max-model-len."
                )
            async for line in response.content:
                data = line[len(_DATA) :].strip()
                if line.startswith(_DATA) and data != _DONE:
                    self._receive(client, stream, usage_in(data))
        if not self._request.stop_at_end_of_text and stream.tokens != tokens:
            raise EngineError(
                f"A response has {stream.tokens} tokens, expected {tokens}: increase "
                "--max-model-len of the servers."
            )
        if self._window is not None:
            self._window.requests += 1
            self._window.end_of(stream)
        del self._streams[client]

    def _receive(self, client: int, stream: _Stream, usage: Usage) -> None:
        new = usage.completion_tokens - stream.tokens
        if new <= 0:
            return  # the role, and the end of the stream
        now, before = self._clock.seconds, stream.last
        stream.last, stream.tokens = now, stream.tokens + new
        self._answered.add(client)
        self.received += new
        window = self._window
        if window is None:
            return
        window.tokens += new
        if before is None:
            window.ttfts.append(now - stream.sent)
            window.prompt_tokens += usage.prompt_tokens
        else:
            window.gaps.append(now - before)
            stream.window_seconds += now - before
            stream.window_tokens += new


class BatchLoad:
    """`async with BatchLoad(...) as load:` sends all requests, and aborts them when the block ends.

    `bodies` are those of requests to `/v1/completions`.
    """

    def __init__(
        self,
        session: ClientSession,
        url: str,
        bodies: Sequence[dict[str, object]],
        label: str = "",
    ) -> None:
        """`label` names the server in errors."""
        self._session, self._url, self._bodies = session, url, bodies
        self._label = label or url
        self._clients: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._clients = [asyncio.create_task(self._send(body)) for body in self._bodies]
        return self

    async def __aexit__(self, *_: object) -> None:
        await _cancel(self._clients)

    @property
    def has_ended(self) -> bool:
        """Whether a request has ended; raises the first error of a request."""
        _require_no_error(self._clients, self._label)
        return any(client.done() for client in self._clients)

    async def _send(self, body: dict[str, object]) -> None:
        body = {**body, "stream": True}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise EngineError(
                    f"The server answered {response.status}: {(await response.text())[:500]}"
                )
            async for line in response.content:
                data = line[len(_DATA) :].strip()
                if line.startswith(_DATA) and data.startswith(b'{"error"'):
                    raise EngineError(f"The server reported {data.decode()}.")


async def _cancel(clients: Sequence[asyncio.Task[None]]) -> None:
    """Closes the connections; the server aborts what is left as soon as it runs."""
    for client in clients:
        client.cancel()
    # Not one `await` after another: an interruption of this task would look like that of a client.
    await asyncio.gather(*clients, return_exceptions=True)


def _require_no_error(clients: Sequence[asyncio.Task[None]], label: str) -> None:
    for client in clients:
        if client.done() and not client.cancelled() and (problem := client.exception()):
            reason = str(problem) or type(problem).__name__
            raise EngineError(f"{label}: {reason}") from problem


@dataclass(frozen=True, slots=True)
class DraftCounters:
    """The server's speculation counters since it started."""

    drafts: float
    draft_tokens: float
    accepted: float
    by_position: Sequence[float]

    def since(self, earlier: DraftCounters) -> Drafting | None:
        drafts = self.drafts - earlier.drafts
        if not drafts:
            return None
        before = [*earlier.by_position, *([0.0] * len(self.by_position))]
        return Drafting(
            drafts=round(drafts),
            draft_tokens=round(self.draft_tokens - earlier.draft_tokens),
            accepted=round(self.accepted - earlier.accepted),
            by_position=[
                (now - then) / drafts for now, then in zip(self.by_position, before, strict=False)
            ],
        )


async def read_counters(session: ClientSession, url: str) -> DraftCounters:
    async with session.get(f"{url}/metrics") as response:
        return parse_counters(await response.text())


def parse_counters(metrics: str) -> DraftCounters:
    """From the text of `/metrics`, summed over engines; zeros without speculation."""
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    try:
        for family in text_string_to_metric_families(metrics):
            if not family.name.startswith(_COUNTERS):
                continue
            for sample in family.samples:
                if not sample.name.endswith("_total"):
                    continue
                if not math.isfinite(sample.value):
                    raise ValueError(f"{sample.name} is {sample.value}")
                name = sample.name.removeprefix(_COUNTERS).removesuffix("_total")
                if "position" in sample.labels:
                    place = int(sample.labels["position"])
                    positions[place] = positions.get(place, 0.0) + sample.value
                else:
                    totals[name] = totals.get(name, 0.0) + sample.value
    except (ValueError, LookupError, TypeError, AttributeError) as problem:  # the parser's
        raise EngineError(
            f"The server's /metrics are not as vLLM writes them ({shortened(str(problem))}). Check "
            "that the address is that of a vLLM server."
        ) from None
    return DraftCounters(
        drafts=totals.get("drafts", 0.0),
        draft_tokens=totals.get("draft_tokens", 0.0),
        accepted=totals.get("accepted_tokens", 0.0),
        by_position=[positions[place] for place in sorted(positions)],
    )
