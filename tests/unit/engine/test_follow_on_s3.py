"""A server follows a registry on S3: swaps, waits for a store that fails, refuses wrong files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from leadout.engine import fail_safe
from leadout.engine.follower import Follower
from leadout.engine.hot_swap import NotNowError, Swapper, version_to_start_with
from leadout.engine.rollout import ServingDrafter
from leadout.engine.settings import version_of_drafter
from leadout.registry import Registry
from leadout.storage.s3 import S3Storage
from support.s3_server import FakeNetwork, S3Server, fake_network
from support.two_workers import TwoWorkers
from support.version_registry import WEIGHTS, publish


@pytest.fixture
def network(
    s3_server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeNetwork]:
    """The way to the server, which can fail."""
    monkeypatch.setattr(fail_safe, "FIRST_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(fail_safe, "MAX_RETRY_SECONDS", 0.0)
    with fake_network(s3_server) as connection:
        monkeypatch.setattr(S3Storage, "options", connection.options())
        yield connection


def test_a_server_follows_a_registry_on_s3(
    network: FakeNetwork, s3_url: str, target: Path, tmp_path: Path
) -> None:
    registry = Registry(s3_url)
    publish(registry, target, tmp_path, seed=0)
    registry.point_to(1, "the start")
    assert version_to_start_with(registry, target) == (1, None)
    assert version_of_drafter(registry, str(registry.path(1))) == 1
    assert (registry.path(1) / WEIGHTS).is_file()  # where vLLM loads it from

    engine = TwoWorkers(Registry(s3_url), target, 1)
    drafter = ServingDrafter(
        registry, registry.manifest(1), Swapper(engine), [], drafts_whole_blocks=True
    )
    follower = Follower(registry, drafter)

    def poll() -> None:
        asyncio.run(follower.poll())

    for version in (2, 3):
        publish(registry, target, tmp_path, seed=version, parent=version - 1)
    registry.point_to(2, "better")
    poll()
    assert engine.loaded == [2, 2]

    # Not now: the store answers nothing but errors for a while.
    registry.point_to(3, "better still")
    for worker in engine.workers:
        worker._registry = _Unreachable(registry, network)  # type: ignore[assignment]
    with pytest.raises(NotNowError):
        poll()
    assert engine.loaded == [2, 2]
    for worker in engine.workers:
        worker._registry = registry
    poll()
    assert engine.loaded == [3, 3]

    # Never: an object is not the one that was published.
    publish(registry, target, tmp_path, seed=4, parent=3)
    registry.storage.write(f"versions/0004/{WEIGHTS}", b"half")
    registry.point_to(4, "better again")
    for _ in range(2):
        poll()
    assert engine.loaded == [3, 3]
    refused = [entry for entry in registry.ledger() if entry.event == "refused"]
    assert [entry.version for entry in refused] == [4]
    pointer = registry.roll_back(4, "a test")
    assert pointer is not None
    assert pointer.version == 3


class _Unreachable(Registry):
    """A registry whose store fails while a version is read from it."""

    def __init__(self, registry: Registry, network: FakeNetwork) -> None:
        super().__init__(registry.storage)
        self._network = network

    def verify(self, version: int):  # type: ignore[no-untyped-def]
        self._network.set_mode("503")
        try:
            return super().verify(version)
        finally:
            self._network.set_mode("pass")
