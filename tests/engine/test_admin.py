"""The admin endpoints require the key and accept version numbers only. No engine runs."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from leadout.engine import admin, bearer_key
from leadout.engine.admin import KEY, AdminPlugin, read_version, verifies_whole_blocks
from leadout.engine.bearer_key import has_key
from leadout.engine.fail_safe import LimitedLog
from leadout.engine.hot_swap import Swapper
from leadout.engine.rollout import ServingDrafter
from leadout.registry import Manifest, Registry
from support.models import tiny_llama
from support.two_workers import TwoWorkers
from support.version_registry import publish, with_nan

RIGHT = {"Authorization": "Bearer a-key-that-is-long"}


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Leadout logs in the server from here on."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    monkeypatch.setattr(logging.getLogger("vllm.leadout"), "handlers", [Collect()])
    return lines


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bearer_key, "WRONG_KEY_SECONDS", 0.0)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    tiny_llama().save_pretrained(tmp_path / "target")
    registry = Registry(tmp_path / "registry")
    for seed in (0, 1):
        publish(registry, tmp_path / "target", tmp_path, seed=seed)
    registry.point_to(1, "the start")
    return registry


@pytest.fixture
def engine(registry: Registry, tmp_path: Path) -> TwoWorkers:
    return TwoWorkers(registry, tmp_path / "target", 1)


@pytest.fixture
def client(
    registry: Registry, engine: TwoWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TestClient:
    monkeypatch.setenv(KEY, "a-key-that-is-long")
    app = FastAPI()
    AdminPlugin().attach_router(app)
    app.state.leadout_drafter = ServingDrafter(
        registry,
        registry.manifest(1),
        Swapper(engine),
        [tmp_path / "numbers.json"],
        drafts_whole_blocks=True,
    )
    return TestClient(app)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer another-key"},
        {"Authorization": "Bearer "},
        {"Authorization": "a-key-that-is-long"},
        {"Authorization": "Basic a-key-that-is-long"},
        {"Authorization": "Bearer a-key-that-is-long2"},
        {"Authorization": b"Bearer \xff\xfe"},
    ],
)
def test_requests_without_the_key_are_rejected(
    client: TestClient, engine: TwoWorkers, headers: dict[str, str]
) -> None:
    assert client.get("/leadout/drafter", headers=headers).status_code == 401
    asked = client.post("/leadout/swap", headers=headers, json={"version": 2})
    assert asked.status_code == 401
    assert engine.calls == []


def test_without_a_key_in_the_environment_there_are_no_routes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY, "")
    app = FastAPI()
    AdminPlugin().attach_router(app)
    client = TestClient(app)
    assert client.get("/leadout/drafter", headers={"Authorization": "Bearer "}).status_code == 404


def test_a_short_key_adds_no_routes(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    monkeypatch.setenv(KEY, "k")
    app = FastAPI()
    AdminPlugin().attach_router(app)
    asked = TestClient(app).get("/leadout/drafter", headers={"Authorization": "Bearer k"})
    assert asked.status_code == 404
    assert f"{KEY} has 1 characters, expected at least 16" in logged[0]


def test_wrong_keys_are_refused_late_and_logged_once(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(bearer_key, "WRONG_KEY_SECONDS", 0.3)
    monkeypatch.setattr(bearer_key, "_wrong_key_log", LimitedLog(logging.WARNING))
    started = time.monotonic()
    for _ in range(2):
        assert client.get("/leadout/drafter").status_code == 401
    assert time.monotonic() - started >= 0.6
    assert logged == ["Leadout's HTTP routes were asked without the right key"]


def test_a_key_that_is_not_utf_8_is_compared_as_bytes() -> None:
    key = os.fsdecode(b"\xff" * 16)  # as it comes from the environment

    def request(authorization: bytes) -> Request:
        return Request({"type": "http", "headers": [(b"authorization", authorization)]})

    assert has_key(request(b"Bearer " + b"\xff" * 16), [key])
    assert not has_key(request(b"Bearer a-key-that-is-long"), [key])


def test_the_key_allows_to_show_and_swap(client: TestClient, engine: TwoWorkers) -> None:
    before = client.get("/leadout/drafter", headers=RIGHT).json()
    assert (before["version"], before["watch"]) == (1, "off")
    after = client.post("/leadout/swap", headers=RIGHT, json={"version": 2})
    assert after.status_code == 200
    assert after.json()["version"] == 2
    assert after.json()["fingerprint"] != before["fingerprint"]
    assert engine.loaded == [2, 2]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"version": "2"}',
        b'{"version": "../2"}',
        b'{"version": 2.0}',
        b'{"version": true}',
        b'{"version": 0}',
        b'{"version": -1}',
        b'{"version": 1000000000}',
        b'{"version": 2, "path": "/etc"}',
        b'{"version": 2, "folder": "elsewhere"}',
        b'{"version": {"__class__": "os.system"}}',
    ],
)
def test_anything_but_one_whole_number_is_refused(
    client: TestClient, engine: TwoWorkers, body: bytes
) -> None:
    asked = client.post("/leadout/swap", headers=RIGHT, content=body)
    assert asked.status_code == 422
    assert 'expected {"version": NUMBER}' in asked.json()["error"]
    assert engine.calls == []


def test_a_long_body_is_not_read(client: TestClient) -> None:
    asked = client.post("/leadout/swap", headers=RIGHT, content=b" " * 2000)
    assert asked.status_code == 413


def test_a_version_that_cannot_be_served_is_refused_with_the_reason(
    client: TestClient, engine: TwoWorkers, registry: Registry, tmp_path: Path
) -> None:
    publish(registry, tmp_path / "target", tmp_path, seed=2, spoil=with_nan)
    registry.mark_bad(2, "slow")
    for version, words in {9: "does not exist", 2: "marked as bad: slow", 3: "NaN"}.items():
        asked = client.post("/leadout/swap", headers=RIGHT, json={"version": version})
        assert asked.status_code == 409
        assert words in asked.json()["error"]
    assert engine.loaded == [1, 1]


def test_a_server_without_a_registry_reports_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "a-key-that-is-long")
    app = FastAPI()
    AdminPlugin().attach_router(app)
    assert not hasattr(app.state, "leadout_drafter")
    app.state.nothing = SimpleNamespace()
    asked = TestClient(app).get("/leadout/drafter", headers=RIGHT)
    assert (asked.status_code, asked.json()["error"]) == (404, "this server follows no registry")


@pytest.mark.parametrize("failures", [2, 99])
def test_storage_that_is_away_for_a_moment_is_waited_for_at_the_start(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(admin, "WAITS_FOR_STORAGE", (0.0, 0.0))
    manifest, reads = registry.manifest(1), []

    def fake_manifest(version: int) -> Manifest:
        reads.append(version)
        if len(reads) <= failures:
            raise OSError("unreachable")
        return manifest

    monkeypatch.setattr(registry, "manifest", fake_manifest)
    if failures == 2:
        assert asyncio.run(read_version(registry, 1))[0] == manifest
    else:
        with pytest.raises(OSError, match="unreachable"):
            asyncio.run(read_version(registry, 1))
    assert reads == [1, 1, 1]


def test_steps_that_only_the_gpu_counts_are_not_compared() -> None:
    """With adaptive verification a good version would look worse than expected under load."""
    speculation = SimpleNamespace(num_speculative_tokens=7, enable_adaptive_verification=False)
    assert verifies_whole_blocks(speculation, 7)
    assert not verifies_whole_blocks(speculation, 15)
    speculation.enable_adaptive_verification = True
    assert not verifies_whole_blocks(speculation, 7)
