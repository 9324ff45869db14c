"""Clients are told apart by what they cannot forge; the scheduler sees no address and no key."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leadout.engine.clients import (
    HEADER,
    ClientMiddleware,
    ClientReader,
    ClientTags,
    make_client_tags,
)

CONFIG = SimpleNamespace(instance_id="abcde", kv_events_config=None)
KEYS = SimpleNamespace(api_key=["first", "second"])
ONE_KEY = SimpleNamespace(api_key=["first"])


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(autouse=True)
def reader(_own_temporary_folder: None) -> ClientReader:
    """That of the first engine, whose secret all processes of the server use."""
    return ClientReader(CONFIG, 0)


def request(address: str | None = "10.0.0.1", **headers: str) -> dict[str, Any]:
    """The scope of an ASGI request."""
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {
        "type": "http",
        "client": None if address is None else (address, 4711),
        "headers": [(b"accept", b"*/*"), *named],
    }


def client_of(tags: ClientTags | None, scope: dict[str, Any]) -> str | None:
    """What the scheduler finds out about a request that went through the middleware."""
    seen: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        seen.append(scope)

    middleware = ClientMiddleware(app, SimpleNamespace(leadout_client_tags=tags))
    asyncio.run(middleware(scope, None, None))
    session = dict(seen[0]["headers"]).get(HEADER)
    engine_request = SimpleNamespace(session_id=None if session is None else session.decode())
    return ClientReader(CONFIG, 1).client_of(engine_request)


def test_addresses_are_clients() -> None:
    tags = make_client_tags(CONFIG, ONE_KEY)
    one, same = (client_of(tags, request("10.0.0.1")) for _ in range(2))
    assert one is not None
    assert one == same == client_of(tags, request("::ffff:10.0.0.1"))
    assert one != client_of(tags, request("10.0.0.2"))
    assert "10.0.0.1" not in one
    assert client_of(tags, request(None)) is None
    assert client_of(tags, request("/run/vllm.sock")) is None


def test_a_network_of_ipv6_addresses_is_one_client() -> None:
    tags = make_client_tags(CONFIG, ONE_KEY)
    one = client_of(tags, request("2001:db8::1"))
    assert one == client_of(tags, request("2001:db8::ffff:2"))
    assert one != client_of(tags, request("2001:db8:0:1::1"))


def test_api_keys_are_clients_if_there_are_several() -> None:
    tags = make_client_tags(CONFIG, KEYS)
    first = client_of(tags, request("10.0.0.1", authorization="Bearer first"))
    assert first == client_of(tags, request("10.0.0.2", authorization="bearer first"))
    assert first != client_of(tags, request("10.0.0.1", authorization="Bearer second"))
    # Routes without authentication: an invented key is none.
    invented = {client_of(tags, request(authorization=f"Bearer {n}")) for n in range(3)}
    assert invented == {client_of(tags, request())}
    shared = make_client_tags(CONFIG, ONE_KEY)
    one, other = (
        client_of(shared, request(address, authorization="Bearer first"))
        for address in ("10.0.0.1", "10.0.0.2")
    )
    assert one != other


def test_a_client_cannot_choose_who_it_is(reader: ClientReader) -> None:
    tags = make_client_tags(CONFIG, ONE_KEY)
    assert client_of(tags, request()) == client_of(tags, request(x_session_id="other"))
    for given in ("other", "", "0" * 48, None):  # as `session_id` in the body of a request
        assert reader.client_of(SimpleNamespace(session_id=given)) is None
    assert reader.client_of(SimpleNamespace()) is None


def test_without_tags_headers_stay_and_clients_are_unknown() -> None:
    scope = request(x_session_id="mine")
    assert client_of(None, scope) is None
    assert (HEADER, b"mine") in scope["headers"]
    events = SimpleNamespace(enable_kv_cache_events=True)
    config = SimpleNamespace(instance_id="abcde", kv_events_config=events)
    assert make_client_tags(config, ONE_KEY) is None


def test_the_secret_is_removed_with_the_engine(reader: ClientReader) -> None:
    (path,) = Path(tempfile.gettempdir()).rglob("clients-*.json")
    assert path.stat().st_mode & 0o077 == 0
    reader.close()
    assert not path.exists()
    assert make_client_tags(CONFIG, ONE_KEY) is None
