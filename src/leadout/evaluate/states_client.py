"""A client for servers of hidden states (`leadout serve --states`): any number of them at once.

Texts go to whichever server has the fewest of them. A server that fails rests for a while, longer
each time, and its texts go to the others, so that a slow or dead server only slows down. What comes
back is checked: the tokens must be those that were sent, and every value must be finite.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx2
import torch
from pydantic import BaseModel, ValidationError

from leadout.engine.states_folder import (
    API_KEY,
    ROUTE,
    States,
    StatesError,
    StatesInfo,
    error_of,
    is_name,
    parse_states,
    path_of,
    remove,
    server_id,
)
from leadout.errors import shortened

CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.005
PATIENCE_SECONDS = 2.0  # before a server that does not write its file is asked whether it lives
FIRST_REST_SECONDS, MAX_REST_SECONDS = 0.5, 30.0
MAX_BAD_REPLIES = 3  # of one text: wrong tokens or values that are not finite


class BadReplyError(StatesError):
    """A server answered with states that cannot be used."""


class RefusedError(StatesError):
    """A server refuses the request itself; another server would refuse it, too."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    request_seconds: float = 180.0  # for one text on one server
    give_up_seconds: float = 900.0  # for one text on all servers


class StatesServer:
    """One server; may be used by several threads."""

    def __init__(self, url: str, settings: ClientSettings) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        key = os.environ.get(API_KEY)
        self._seconds = settings.request_seconds
        self._client = httpx2.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(settings.request_seconds, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None),
        )
        self._folder: Path | None = None  # of a server on this machine
        self._knows_folder = False

    def info(self) -> StatesInfo:
        reply = self._call("GET", ROUTE)
        try:
            return StatesInfo.model_validate_json(reply.content)
        except ValidationError:
            raise RefusedError(
                f"{self.url}{ROUTE} does not describe a server of hidden states. Start it with "
                "`leadout serve TARGET --states`."
            ) from None

    def compute(self, tokens: Sequence[int]) -> States:
        """The states of a text, checked."""
        body = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0, "detokenize": False}
        reply = self._call("POST", "/v1/completions", json=body)
        name = _name_in(reply.content)
        if name is None:
            raise RefusedError(
                f"{self.url} computed a text but no states. Start it with `leadout serve TARGET "
                "--states`."
            )
        found = self._read(name)
        self._require_sound(found, tokens)
        return found

    def close(self) -> None:
        self._client.close()

    def _read(self, name: str) -> States:
        """Read a file and delete it: directly if it is on this machine, else through the server."""
        try:
            local = self._local_folder()
            if local is not None:
                path = path_of(local, name)
                content = self._read_file(path)
                remove(path)
            else:
                content = self._call("GET", f"{ROUTE}/{name}").content
                self._call("DELETE", f"{ROUTE}/{name}")
            return parse_states(content)
        except (BadReplyError, RefusedError, httpx2.HTTPError):
            raise
        except StatesError as problem:
            raise BadReplyError(f"{self.url}: {problem}") from None

    def _local_folder(self) -> Path | None:
        """The server's folder, if this process can reach it."""
        if self._folder is not None and not self._folder.exists():  # the server was restarted
            self._knows_folder = False
        if not self._knows_folder:
            info = self.info()
            is_local = server_id(info.folder) == info.server_id
            self._folder = info.folder if is_local else None
            self._knows_folder = True
        return self._folder

    def _read_file(self, path: Path) -> bytes:
        began = time.monotonic()
        asks_at = began + PATIENCE_SECONDS
        while True:
            try:
                return path.read_bytes()
            except FileNotFoundError:
                problem = error_of(path)
                if problem is not None:
                    remove(path)
                    raise BadReplyError(
                        f"{self.url} could not write its states: {problem}"
                    ) from None
                if not path.parent.exists() or time.monotonic() > began + self._seconds:
                    raise StatesError(f"{self.url} did not write {path}") from None
                if time.monotonic() > asks_at:
                    self.info()  # raises if the server died after its reply
                    asks_at = time.monotonic() + PATIENCE_SECONDS
            time.sleep(POLL_SECONDS)

    def _require_sound(self, found: States, tokens: Sequence[int]) -> None:
        if found.tokens.tolist() != list(tokens) or len(found.states) != len(tokens):
            raise BadReplyError(
                f"{self.url} returned the states of other tokens than those sent: "
                f"{len(found.tokens)} tokens, expected {len(tokens)}"
            )
        if not bool(torch.isfinite(found.states).all()):
            raise BadReplyError(
                f"{self.url} returned states that are not finite for a text of {len(tokens)} tokens"
            )

    def _call(self, method: str, path: str, **content: Any) -> httpx2.Response:
        reply = self._client.request(method, path, **content)
        if reply.is_success:
            return reply
        message = f"{self.url}{path} answered {reply.status_code}: {_message_of(reply)}"
        if 400 <= reply.status_code < 500 and reply.status_code not in (404, 408, 425, 429):
            if reply.status_code in (401, 403):
                message += f". Set {API_KEY} to the key of this server."
            raise RefusedError(message)
        raise StatesError(message)


class _Parameters(BaseModel):
    states: str


class _Completion(BaseModel):
    """What is needed of a server's reply; vLLM passes `kv_transfer_params` on as they are."""

    kv_transfer_params: _Parameters


def _name_in(reply: bytes) -> str | None:
    """The name of the states that a server has computed; None if there is none."""
    try:
        name = _Completion.model_validate_json(reply).kv_transfer_params.states
    except ValidationError:
        return None
    return name if is_name(name) else None


def _message_of(reply: httpx2.Response) -> str:
    try:
        found = reply.json()["error"]
        return shortened(str(found["message"] if isinstance(found, dict) else found))
    except (ValueError, KeyError, TypeError, RecursionError):
        return shortened(reply.text)


@dataclass(slots=True)
class _Health:
    """What is known about a server."""

    running: int = 0
    failures: int = 0  # since the last success
    rests_until: float = 0.0
    last_error: str = "not asked yet"


@dataclass(slots=True)
class _Attempts:
    """What happened to one text so far."""

    bad_replies: int = 0
    errors: list[str] = field(default_factory=list)


class StatesServers:
    """Several servers as one; may be used by several threads."""

    def __init__(
        self,
        urls: Sequence[str],
        settings: ClientSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings = settings or ClientSettings()
        self.servers = [StatesServer(url, self._settings) for url in dict.fromkeys(urls)]
        self._health = {server.url: _Health() for server in self.servers}
        self._lock = threading.Lock()
        self._clock, self._sleep = clock, sleep
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._is_closed = True
        for server in self.servers:
            server.close()

    def require(
        self,
        target_fingerprint: str,
        layer_ids: Sequence[int],
        length: int,
        *,
        exact: bool = False,
    ) -> None:
        """Refuse servers of another target, without these layers, or for shorter texts.

        With `exact`, also those whose states are rounded to FP8.

        A server that does not answer now is left out of the check: it may come back, and what it
        then returns is checked by shape. At least one must answer.
        """
        answered, problems = 0, []
        for server in self.servers:
            try:
                info = server.info()
            except (StatesError, httpx2.HTTPError) as problem:
                if isinstance(problem, RefusedError):
                    raise
                problems.append(f"{server.url}: {_reason(problem)}")
                continue
            answered += 1
            _require_fit(server.url, info, target_fingerprint, layer_ids, length)
            if exact and info.fp8:
                raise StatesError(
                    f"{server.url} hands out states in FP8, whose rounding would look like a fault "
                    "of the drafter. Start it without --states-fp8."
                )
        if not answered:
            raise StatesError(
                f"No server of hidden states answers: {'; '.join(problems)}. Start one with "
                "`leadout serve TARGET --states`."
            )

    def compute(self, tokens: Sequence[int]) -> States:
        """The states of a text [tokens, layers, H], from whichever server returns them."""
        attempts, deadline = _Attempts(), self._clock() + self._settings.give_up_seconds
        while True:
            server = self._next_server(deadline)
            if server is None:
                raise StatesError(self._given_up(tokens))
            try:
                found = server.compute(tokens)
            except RefusedError:
                self._ended(server, None)
                raise
            except (StatesError, httpx2.HTTPError, OSError, ValueError) as problem:
                self._ended(server, _reason(problem))
                if isinstance(problem, BadReplyError):
                    attempts.bad_replies += 1
                    attempts.errors.append(str(problem))
                    if attempts.bad_replies >= MAX_BAD_REPLIES:
                        raise StatesError(
                            f"No server returned usable states: {'; '.join(attempts.errors)}."
                        ) from None
            else:
                self._ended(server, None)
                return found

    def _next_server(self, deadline: float) -> StatesServer | None:
        """The server with the fewest texts among those that do not rest; None: out of time."""
        while not self._is_closed:
            now = self._clock()
            with self._lock:
                awake = [s for s in self.servers if self._health[s.url].rests_until <= now]
                if awake:
                    chosen = min(awake, key=lambda s: self._health[s.url].running)
                    self._health[chosen.url].running += 1
                    return chosen
                wakes = min(each.rests_until for each in self._health.values())
            if now >= deadline:
                return None
            self._sleep(max(0.0, min(wakes, deadline) - now))
        raise StatesError("The client of the servers of hidden states was closed.")

    def _ended(self, server: StatesServer, error: str | None) -> None:
        with self._lock:
            health = self._health[server.url]
            health.running -= 1
            if error is None:
                health.failures = 0
                return
            health.last_error = error
            health.failures += 1
            rest = min(MAX_REST_SECONDS, FIRST_REST_SECONDS * 2 ** (health.failures - 1))
            health.rests_until = self._clock() + rest

    def _given_up(self, tokens: Sequence[int]) -> str:
        reasons = "; ".join(f"{url}: {each.last_error}" for url, each in self._health.items())
        return (
            f"No server returned the hidden states of a text of {len(tokens)} tokens within "
            f"{self._settings.give_up_seconds:.0f} s ({reasons}). Check the servers; the run can "
            "be continued."
        )


def _require_fit(
    url: str, info: StatesInfo, fingerprint: str, layer_ids: Sequence[int], length: int
) -> None:
    if info.target_fingerprint != fingerprint:
        raise StatesError(
            f"{url} serves states of another target (fingerprint {info.target_fingerprint[:12]}, "
            f"expected {fingerprint[:12]}). Start it with the target of this command."
        )
    missing = sorted(set(layer_ids) - set(info.layer_ids))
    if missing:
        flags = " ".join(f"--layers {layer}" for layer in sorted(set(layer_ids)))
        raise StatesError(
            f"{url} hands out the layers {list(info.layer_ids)}, but {missing} are needed too. "
            f"Start it with {flags}."
        )
    if length >= info.max_model_len:
        raise StatesError(
            f"{url} takes texts of at most {info.max_model_len - 1} tokens, but the longest has "
            f"{length}. Start it with --max-model-len {length + 1}, or lower --max-length."
        )


def _reason(problem: Exception) -> str:
    return str(problem) or type(problem).__name__
