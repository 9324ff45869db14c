"""Which client sent a request, as far as that cannot be forged: for limits on what one client does.

A client is an API key where the server has several, otherwise a network address. vLLM does not hand
either of them to its engine, but it does hand over the header `X-Session-ID`. `ClientTags`, in the
API process, puts a tag there; `ClientReader`, in the scheduler, reads it.

- A tag starts with a secret of this server, so that a client cannot make one: vLLM prefers a
  `session_id` in the body of a request, whose sender then counts as unknown.
- Addresses and keys are hashed with the secret and stay in memory. Nothing about a client is kept.
- vLLM uses session ids for KV cache events only. Where those are on, requests are not tagged.
- The address is the one of the connection. Behind a proxy it is taken from `X-Forwarded-For` only
  if uvicorn trusts the proxy (environment variable `FORWARDED_ALLOW_IPS`).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from leadout.engine.counters import read_small, remove_small, small_file, write_small

HEADER = b"x-session-id"
# A host usually has all addresses of an IPv6 network with this prefix.
IPV6_PREFIX_BYTES = 8


class _Secret(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    secret: str


class ClientTags:
    """Tags requests in the API process."""

    def __init__(self, secret: str, api_keys: Iterable[str]) -> None:
        keys = {key.encode() for key in api_keys if key}
        self._secret = secret
        self._api_keys = keys if len(keys) > 1 else set()  # a single one is everybody's

    def tag(self, scope: MutableMapping[str, Any]) -> None:
        """Replace the session id in the headers of an ASGI request."""
        headers = [(name, value) for name, value in scope["headers"] if name != HEADER]
        client = self._client_of(scope)
        if client is not None:
            key = self._secret.encode()
            digest = hashlib.blake2b(client, key=key, digest_size=8).hexdigest()
            headers.append((HEADER, f"{self._secret}{digest}".encode()))
        scope["headers"] = headers

    def _client_of(self, scope: MutableMapping[str, Any]) -> bytes | None:
        for name, value in scope["headers"]:
            scheme, _, key = value.partition(b" ")
            if name == b"authorization" and scheme.lower() == b"bearer" and key in self._api_keys:
                return b"key " + bytes(key)
        host = (scope.get("client") or ("", 0))[0]
        try:
            address = ip_address(host)
        except ValueError:  # a Unix socket, for example
            return None
        if not isinstance(address, IPv6Address):
            return address.packed
        mapped = address.ipv4_mapped
        return address.packed[:IPV6_PREFIX_BYTES] if mapped is None else mapped.packed


class ClientMiddleware:
    """ASGI middleware: tags requests once the server's state has `leadout_client_tags`.

    Added before vLLM's own middleware, it sees only requests that have passed authentication.
    """

    def __init__(self, app: Any, state: Any) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        tags: ClientTags | None = getattr(self._state, "leadout_client_tags", None)
        if tags is not None and scope["type"] == "http":
            tags.tag(scope)
        await self._app(scope, receive, send)


def make_client_tags(vllm_config: Any, args: Any) -> ClientTags | None:
    """The tags of a server whose engine runs; None if they must not or cannot be used."""
    events = getattr(vllm_config, "kv_events_config", None)
    if events is not None and events.enable_kv_cache_events:
        return None
    found = read_small(_secret_file(vllm_config), _Secret)
    keys = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY", "")]
    return None if found is None else ClientTags(found.secret, keys)


class ClientReader:
    """Reads tags in the scheduler. The first engine of a server makes the secret."""

    def __init__(self, vllm_config: Any, engine: int) -> None:
        self._path, self._is_first = _secret_file(vllm_config), engine == 0
        self._secret: str | None = None
        if self._is_first:
            with suppress(OSError):  # clients remain unknown
                write_small(_Secret(secret=secrets.token_hex(16)), self._path)

    def client_of(self, request: Any) -> str | None:
        """The client of a request of vLLM's; None if it is unknown."""
        session = getattr(request, "session_id", None)
        if session is None:
            return None
        if self._secret is None:
            found = read_small(self._path, _Secret)
            self._secret = None if found is None else found.secret
        if self._secret is None or not session.startswith(self._secret):
            return None
        return str(session[len(self._secret) :])

    def close(self) -> None:
        """OSError if the secret cannot be removed."""
        if self._is_first:
            remove_small(self._path)


def _secret_file(vllm_config: Any) -> Path:
    return small_file("clients", vllm_config.instance_id, 0)
