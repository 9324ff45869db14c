"""The harness of the chaos test notices what it is there to notice."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from leadout.engine.server import HOST, free_port
from support.chaos import Outage
from support.chaos_traffic import Failure, Traffic
from support.chaos_world import Disk, Sample, disk, growth_of

EXPECTED = [([1, 2], [3, 4]), ([5, 6], [7, 8])]


@contextmanager
def fake_replica(answers: dict[tuple[int, ...], list[int]] | None) -> Iterator[str]:
    """A server with these answers by prompt; without any, it breaks every connection."""
    port, is_up, is_over = free_port(), threading.Event(), threading.Event()

    async def answer(request: web.Request) -> web.Response:
        if answers is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        ids = answers[tuple((await request.json())["prompt"])]
        return web.json_response({"choices": [{"token_ids": ids}]})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def serve() -> None:
        application = web.Application()
        application.router.add_post("/v1/completions", answer)
        application.router.add_get("/health", health)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, HOST, port).start()
        is_up.set()
        while not is_over.is_set():
            await asyncio.sleep(0.01)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    is_up.wait()
    try:
        yield f"http://{HOST}:{port}"
    finally:
        is_over.set()
        thread.join()


def run_traffic(urls: dict[str, str], answers: int, failures: int = 0) -> Traffic:
    with Traffic(urls, {"max_tokens": 2}, EXPECTED, clients=2) as traffic:
        deadline, seen = time.monotonic() + 600, traffic.seen
        while seen.answers.total() < answers or len(seen.failures) < failures:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    return traffic


def test_a_refused_connection_is_tried_at_another_replica() -> None:
    with fake_replica({(1, 2): [3, 4], (5, 6): [7, 8]}) as url:
        nobody = f"http://{HOST}:{free_port()}"
        seen = run_traffic({"down": nobody, "up": url}, answers=8).seen
    assert seen.failures == []
    assert seen.changed == []
    assert set(seen.answers) == {"up"}


def test_changed_answers_and_broken_connections_are_seen() -> None:
    with fake_replica({(1, 2): [3, 4], (5, 6): [7, 9]}) as url:
        seen = run_traffic({"wrong": url}, answers=4).seen
    assert len(seen.changed) == seen.answers["wrong"] // 2
    with fake_replica(None) as url:
        seen = run_traffic({"broken": url}, answers=0, failures=2).seen
    assert {failure.replica for failure in seen.failures} == {"broken"}


def test_only_failures_at_the_killed_replica_are_explained() -> None:
    outage = Outage("b", began=10.0, ended=20.0)
    assert outage.explains(Failure("b", began=5.0, ended=10.5, what=""))
    assert not outage.explains(Failure("a", began=5.0, ended=10.5, what=""))
    assert not outage.explains(Failure("b", began=5.0, ended=9.0, what=""))
    assert not outage.explains(Failure("b", began=21.0, ended=22.0, what=""))


@pytest.mark.parametrize(
    ("per_second", "descriptors", "is_within"), [(0.0, 0, True), (0.5, 0, False), (0.0, 1, False)]
)
def test_growth_is_measured_after_the_warm_up(
    per_second: float, descriptors: int, is_within: bool
) -> None:
    samples = [
        Sample(float(second), 300 if second < 20 else 500 + per_second * second, 50)
        for second in range(400)
    ]
    samples[-100:] = [
        Sample(each.when, each.mebibytes, 50 + 20 * descriptors) for each in samples[-100:]
    ]
    growth = growth_of("server", samples, min_seconds=100)
    assert growth is not None
    assert growth.is_within(0.1, 16) is is_within
    assert growth_of("server", samples, min_seconds=500) is None


PROBE = """
import json, sys, time
from pathlib import Path
folder, found = Path(sys.argv[1]), {}
began = time.monotonic()
for name, mode in (("versions/0001/a", "r"), ("ledger", "r"), ("ledger", "a")):
    try:
        (folder / name).open(mode).close()
        found[name + " " + mode] = 0
    except OSError as error:
        found[name + " " + mode] = error.strerror
print(json.dumps([time.monotonic() - began, found]))
"""


def test_the_fake_disk_is_full_slow_or_lost_for_other_processes(tmp_path: Path) -> None:
    def probe(folder: Disk) -> tuple[float, dict[str, object]]:
        command = [sys.executable, "-c", PROBE, str(folder.folder)]
        done = subprocess.run(command, env=folder.environment, stdout=subprocess.PIPE, check=True)
        seconds, found = json.loads(done.stdout)
        return seconds, found

    with disk(tmp_path, may_mount=False) as folder:
        (folder.folder / "versions" / "0001").mkdir(parents=True)
        for name in ("versions/0001/a", "ledger"):
            (folder.folder / name).touch()
        usual = {"versions/0001/a r": 0, "ledger r": 0, "ledger a": 0}
        assert probe(folder)[1] == usual
        with folder.full():
            assert probe(folder)[1] == usual | {"ledger a": "No space left on device"}
        with folder.stale():
            assert probe(folder)[1] == usual | {"versions/0001/a r": "Stale file handle"}
        with folder.slow(0.5):
            seconds, found = probe(folder)
        assert seconds > 1.5
        assert found == usual
        assert probe(folder)[1] == usual
