"""OpenAI-compatible vLLM servers as one backend: token ids in, token ids out.

All servers take requests from one queue, each as many as it may have in flight, so a slow server
takes fewer. A server that does not answer gets a rest, and is verified again before it gets work;
its requests go back to the front of the queue, for whichever server is next. A request is retried
by the client in the same server first, then in others, and fails only if servers that answer other
requests failed with it several times.

The event loop runs in a thread of its own: the job's files are written by the main thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from pydantic import TypeAdapter, ValidationError

from leadout.data.answers import Failure
from leadout.data.chat import Chat, TemplateError
from leadout.data.settings import server_root
from leadout.engine.offline import Completion, TextRequest
from leadout.errors import LeadoutError, shown
from leadout.files import first_problem
from leadout.models import same_model
from leadout.shards import TokenIds

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MAX_ATTEMPTS = 5  # of a request, over all servers
MAX_FAILURES = 3  # of a server in a row, until it rests
FIRST_REST, LONGEST_REST = 1.0, 60.0  # seconds, doubled each time
CLIENT_RETRIES = 2
VERIFY_SECONDS = 60.0  # for one answer; a server that is busy or new takes longer than usual
REFUSED = (400, 413, 422)  # the request is at fault, not the server
# vLLM takes what a request leaves out from the model's generation_config.json.
NEUTRAL = {
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_TOKENS: TypeAdapter[list[int]] = TypeAdapter(TokenIds)
_PROBE = "The quick brown fox: 12,345 naïve tests\n\tand 你好 (ünïcödé)!"


class EndpointError(LeadoutError):
    """Servers that cannot be used, or of which none answers any more."""


class _WrongServerError(EndpointError):
    """A server that answers, but would give wrong data."""


@dataclass(slots=True)
class _Server:
    url: str  # without /v1
    api: AsyncOpenAI
    root: AsyncOpenAI  # the same without /v1, for what is not OpenAI's
    model: str = ""
    answered: int = 0
    rests: int = 0
    failures: list[int] = field(default_factory=list)  # since its last answer, by request
    last_problem: str = ""


@dataclass(order=True, slots=True)
class _Queued:
    number: int  # earlier requests come first, also when they are put back
    request: TextRequest = field(compare=False)
    attempts: int = field(default=0, compare=False)


class Endpoints:
    """Several servers as a `Backend`; use it as a context manager.

    `served_model` is the target's name in the servers; None: what they serve must be called like
    `target`. `notice` gets a line whenever a server stops or resumes.
    """

    def __init__(
        self,
        urls: Sequence[str],
        target: str,
        chat: Chat,
        *,
        max_length: int,
        concurrency: int,
        served_model: str | None = None,
        answer_seconds: float = 1800.0,
        patience_seconds: float = 1800.0,
        heartbeat_seconds: float = 5.0,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._urls = [server_root(url) for url in urls]
        self._target = target
        self._chat = chat
        self._max_length = max_length
        self._concurrency = concurrency
        self._served_model = served_model
        self._answer_seconds = answer_seconds
        self._patience_seconds = patience_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._notice = notice
        self.running = 0
        self._submitted = 0
        self._servers: list[_Server] = []
        self._left = len(urls)  # servers that were not found to be wrong ones
        self._results: queue.Queue[Completion | Failure | BaseException] = queue.Queue()
        self._loop = asyncio.new_event_loop()
        self._requests: asyncio.PriorityQueue[_Queued] = asyncio.PriorityQueue()
        self._tasks: list[asyncio.Task[None]] = []
        self._thread = threading.Thread(target=self._run, name="endpoints", daemon=True)

    def __enter__(self) -> Self:
        """Verify all servers; at least one must be available, the others may come later."""
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    def submit(self, request: TextRequest) -> None:
        self.running += 1
        queued = _Queued(self._submitted, request)
        self._submitted += 1
        self._loop.call_soon_threadsafe(self._requests.put_nowait, queued)

    def step(self) -> list[Completion | Failure]:
        """Wait for the next results."""
        waited_since = time.monotonic()
        while True:
            try:
                results = [self._results.get(timeout=0.5)]
                break
            except queue.Empty:
                if time.monotonic() - waited_since > self._patience_seconds:
                    raise EndpointError(
                        f"No server has answered for {self._patience_seconds:.0f} seconds. "
                        f"{' '.join(self.summary())} Run the same command with --resume when they "
                        "are back."
                    ) from None
        with suppress(queue.Empty):
            while True:
                results.append(self._results.get_nowait())
        found: list[Completion | Failure] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            found.append(result)
        self.running -= len(found)
        return found

    def summary(self) -> list[str]:
        """A sentence about each server."""
        lines = []
        for server in self._servers:
            rests = f", {server.rests} rests" if server.rests else ""
            last = f", last problem: {server.last_problem}" if server.last_problem else ""
            lines.append(f"{server.url}: {server.answered:,} answers{rests}{last}.")
        return lines

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _start(self) -> None:
        self._servers = [self._connect(url) for url in self._urls]
        found = await asyncio.gather(
            *(self._problem_of(server) for server in self._servers), return_exceptions=True
        )
        for problem in found:
            if isinstance(problem, BaseException):
                raise problem
        if all(found):
            raise EndpointError(
                f"--endpoint: none of the servers can be used. {'; '.join(map(str, found))}. "
                "Start them with `vllm serve TARGET`, or check the addresses."
            )
        for server, problem in zip(self._servers, found, strict=True):
            self._tasks.append(self._loop.create_task(self._guarded(server, bool(problem))))

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            await server.api.close()
            await server.root.close()

    def _connect(self, url: str) -> _Server:
        from openai import AsyncOpenAI, Timeout

        def client(base: str) -> AsyncOpenAI:
            return AsyncOpenAI(
                base_url=base,
                api_key=os.environ.get("OPENAI_API_KEY") or "EMPTY",
                max_retries=CLIENT_RETRIES,
                timeout=Timeout(self._answer_seconds, connect=10.0),
            )

        return _Server(url, client(f"{url}/v1"), client(url))

    # The life of a server

    async def _guarded(self, server: _Server, is_resting: bool) -> None:
        """A server that turns out to be a wrong one gets no more work; a bug here ends the job."""
        try:
            await self._serve(server, is_resting)
        except Exception as problem:
            server.last_problem = str(problem)
            self._left -= 1
            if not isinstance(problem, EndpointError) or not self._left:
                self._results.put(problem)
            else:
                self._notice(f"{problem} The job continues without it.")

    async def _serve(self, server: _Server, is_resting: bool) -> None:
        rest = FIRST_REST
        while True:
            if is_resting:
                await asyncio.sleep(rest)
                rest = min(2 * rest, LONGEST_REST)
                if await self._problem_of(server):
                    continue
                self._notice(f"{server.url} is available")
            before = server.answered
            await self._work_until_trouble(server)
            if server.answered > before:
                rest = FIRST_REST
            server.rests += 1
            is_resting = True
            self._notice(f"{server.url} gets a rest: {server.last_problem}")

    async def _work_until_trouble(self, server: _Server) -> None:
        """Take requests until the server fails; those in flight then go back into the queue."""
        parts = [self._worker(server) for _ in range(self._concurrency)]
        tasks = [self._loop.create_task(each) for each in (self._heartbeat(server), *parts)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises if it was not the server that failed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _worker(self, server: _Server) -> None:
        while True:
            queued = await self._requests.get()
            try:
                result = await self._result(server, queued)
            except BaseException:  # cancelled because the server rests, or the server is wrong
                self._requests.put_nowait(queued)
                raise
            if result is not None:
                server.answered += isinstance(result, Completion)
                server.failures.clear()
                self._results.put(result)
                continue
            server.failures.append(queued.number)
            # If a server fails with everything, that says nothing about this request.
            queued.attempts += len(set(server.failures)) < MAX_FAILURES
            if queued.attempts < MAX_ATTEMPTS:
                self._requests.put_nowait(queued)
            else:
                reason = f"failed {queued.attempts} times, last in {server.url}: "
                self._results.put(Failure(queued.request.id, reason + server.last_problem))
            if len(server.failures) >= MAX_FAILURES or not await self._is_alive(server):
                return

    async def _result(self, server: _Server, queued: _Queued) -> Completion | Failure | None:
        """None: the server could not answer."""
        from openai import APIError, APIStatusError

        request = queued.request
        try:
            async with asyncio.timeout(self._answer_seconds):  # the client's retries included
                reply = await server.api.completions.create(
                    model=server.model, prompt=list(request.prompt), extra_body=body_of(request)
                )
        except TimeoutError:
            server.last_problem = f"no answer within {self._answer_seconds:g} seconds"
            return None
        except APIStatusError as problem:
            if problem.status_code in REFUSED:
                return Failure(request.id, f"{server.url} refuses it: {_reason(problem)}")
            server.last_problem = f"HTTP {problem.status_code}: {_reason(problem)}"
            return None
        except (APIError, json.JSONDecodeError) as problem:  # no connection, no valid reply
            server.last_problem = _reason(problem)
            return None
        answer = answer_in(reply, request, server.url)
        if isinstance(answer, str):
            server.last_problem = answer
            return None
        return answer

    async def _heartbeat(self, server: _Server) -> None:
        """Ends when the server does not respond: a paused process keeps its connections."""
        missed = 0
        while missed < MAX_FAILURES:
            await asyncio.sleep(self._heartbeat_seconds)
            missed = 0 if await self._is_alive(server) else missed + 1

    async def _is_alive(self, server: _Server) -> bool:
        from openai import APIError, APIStatusError

        client = server.root.with_options(max_retries=0, timeout=self._heartbeat_seconds)
        try:
            await client.get("/health", cast_to=str)
        except APIStatusError as problem:
            if problem.status_code < 500:  # a proxy without this path
                return True
            server.last_problem = f"HTTP {problem.status_code} from /health"
            return False
        except APIError as problem:
            server.last_problem = f"no response from /health ({_reason(problem)})"
            return False
        return True

    # What a server must be

    async def _problem_of(self, server: _Server) -> str:
        """Why the server cannot be used now; empty if it can. Raises if it serves another model."""
        from openai import APIError, APIStatusError

        client = server.api.with_options(max_retries=0, timeout=VERIFY_SECONDS)
        try:
            listed = await _listed_models(client)
            if listed is None:
                server.last_problem = "/v1/models does not answer as vLLM does"
                return f"{server.url}: {server.last_problem}"
            await self._verify(server, listed)
        except APIStatusError as problem:
            if problem.status_code in (401, 403):
                raise EndpointError(
                    f"{server.url} refuses the API key: {_reason(problem)}. Set OPENAI_API_KEY."
                ) from None
            server.last_problem = f"HTTP {problem.status_code}: {_reason(problem)}"
            return f"{server.url}: {server.last_problem}"
        except (APIError, json.JSONDecodeError) as problem:
            server.last_problem = _reason(problem)
            return f"{server.url}: {server.last_problem}"
        return ""

    async def _verify(self, server: _Server, cards: Sequence[Mapping[str, Any]]) -> None:
        names = [str(card["id"]) for card in cards if card.get("parent") is None]
        for card in cards:
            name, root = str(card["id"]), str(card.get("root") or card["id"])
            if name == self._served_model or (
                self._served_model is None
                and card.get("parent") is None
                and (same_model(name, self._target) or same_model(root, self._target))
            ):
                break
        else:
            raise _WrongServerError(
                f"{server.url} serves {', '.join(names) or 'no model'}, expected "
                f"{self._served_model or self._target}. If that is the same model under another "
                "name, add --served-model NAME."
            )
        longest = card.get("max_model_len")
        if isinstance(longest, int) and longest < self._max_length:
            raise _WrongServerError(
                f"{server.url} has --max-model-len {longest}, but prompt and answer can have "
                f"{self._max_length} tokens. Restart it with more, or use --max-length {longest}."
            )
        server.model = name
        await self._compare_tokenizers(server)

    async def _compare_tokenizers(self, server: _Server) -> None:
        own = self._chat.plain(_PROBE)
        theirs = await self._tokenize(server, {"prompt": _PROBE})
        if theirs is not None and theirs != own:
            raise _WrongServerError(
                f"{server.url} has another tokenizer than {self._target}: it makes {theirs[:8]}... "
                f"of a test sentence, expected {own[:8]}... Serve the model of this target."
            )
        with suppress(TemplateError):
            rendered = self._chat.prompt([_PROBE])
            messages = [{"role": "user", "content": _PROBE}]
            body = {"messages": messages, "chat_template_kwargs": self._chat.options}
            theirs = await self._tokenize(server, body)
            if theirs is not None and theirs != rendered:
                self._notice(
                    f"{server.url} renders conversations differently than the chat template of "
                    f"{self._target}; data is made with the latter"
                )

    async def _tokenize(self, server: _Server, body: dict[str, Any]) -> list[int] | None:
        """The server's token ids; None if it does not offer them."""
        from openai import APIStatusError

        client = server.root.with_options(max_retries=0, timeout=VERIFY_SECONDS)
        try:
            reply = await client.post(
                "/tokenize", cast_to=object, body={"model": server.model, **body}
            )
        except APIStatusError as problem:
            if problem.status_code < 500:
                return None
            raise
        tokens = reply.get("tokens") if isinstance(reply, dict) else None
        return list(tokens) if isinstance(tokens, list) else None


async def _listed_models(client: AsyncOpenAI) -> list[dict[str, Any]] | None:
    """The models that a server lists; None if the reply is something else, such as a web page."""
    try:
        cards = [card.to_dict() async for card in client.models.list()]
    except (AttributeError, TypeError, json.JSONDecodeError):  # the client's parser expects JSON
        return None
    return cards if all("id" in card for card in cards) else None


def answer_in(reply: Any, request: TextRequest, url: str) -> Completion | str:
    """The answer in what the client made of a reply, or why there is none."""
    try:
        # The client returns a reply that is no JSON, such as the page of a proxy, as text, and
        # parts of other types than expected as they are.
        choice = reply.choices[0]
        more, finish = choice.model_extra or {}, choice.finish_reason
    except (AttributeError, TypeError, LookupError):
        return "a reply without an answer"
    tokens, prompt = more.get("token_ids"), more.get("prompt_token_ids")
    if tokens is None or prompt != list(request.prompt):
        what = "no token ids" if tokens is None else "another prompt than it was sent"
        raise _WrongServerError(
            f"{url} returned {what}; expected a vLLM server, which returns token_ids and "
            "prompt_token_ids with `return_token_ids`."
        )
    if finish not in ("stop", "length") or not tokens:
        return f"an answer ended with {shown(finish)}"
    try:
        found = _TOKENS.validate_python(tokens, strict=True)
    except ValidationError as problem:
        return f"an answer without usable token ids ({first_problem(problem, 'token_ids')})"
    return Completion(request.id, found, "stop" if finish == "stop" else "length")


def body_of(request: TextRequest) -> dict[str, Any]:
    """All sampling parameters of a request, by their names in vLLM's API."""
    return {
        **NEUTRAL,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed if request.temperature > 0 else None,
        "stop_token_ids": list(request.stop_tokens),
        "ignore_eos": request.ignore_eos,
        "return_token_ids": True,
        **request.options,
    }


def _reason(problem: Exception) -> str:
    cause = problem.__cause__
    text = " ".join(str(problem).split()).rstrip(".") or type(problem).__name__
    more = f" ({' '.join(str(cause).split())})" if cause is not None and str(cause) else ""
    return f"{text}{more}"[:500]
