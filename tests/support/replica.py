"""One server of a registry without its engine: real roll-out, fake workers, made-up traffic."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from leadout.control.rollback import Tally
from leadout.engine.counters import write_small
from leadout.engine.follower import Follower
from leadout.engine.hot_swap import NotNowError, Swapper
from leadout.engine.rollout import ServingDrafter
from leadout.engine.served_requests import ServedRequests
from leadout.registry import Registry
from support.two_workers import TwoWorkers


def equal_requests(requests: int, acceptance_length: int) -> Tally:
    tally = Tally()
    for _ in range(requests):
        tally = tally.with_request(10, 10 * acceptance_length)
    return tally


class Replica:
    """One server of a registry, without its engine."""

    def __init__(
        self,
        registry: Registry,
        target: Path,
        served_path: Path,
        version: int = 1,
        server: str = "here:8000",
    ) -> None:
        """`server` is the same after a restart."""
        self.engine = TwoWorkers(registry, target, version)
        self.served_path = served_path
        self.drafter = ServingDrafter(
            registry,
            registry.manifest(version),
            Swapper(self.engine),
            [served_path, served_path.with_suffix(".second")],
            drafts_whole_blocks=True,
            server=server,
        )
        self.follower = Follower(registry, self.drafter)

    def serve(self, requests: int, acceptance_length: int, by_client: Tally | None = None) -> None:
        """Pretend that so many equal requests have arrived since the last swap and finished."""
        served = ServedRequests(
            since=time.time(),
            tally=equal_requests(requests, acceptance_length),
            by_client=by_client or Tally(),
        )
        write_small(served, self.served_path)

    def start(self) -> None:
        asyncio.run(self.drafter.start())

    def poll(self) -> None:
        asyncio.run(self.follower.poll())

    def poll_failing(self) -> None:
        """A poll whose error the follower would log."""
        with pytest.raises(NotNowError):
            self.poll()
