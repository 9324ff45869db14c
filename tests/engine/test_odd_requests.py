"""No request ends a server; and a server that is killed leaves nothing after the next start."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leadout.engine.capture_store import segment_paths
from leadout.engine.process_folders import (
    PRIVATE,
    SHARED_MEMORY,
    SOCKETS,
    claim,
    folder_for_sockets,
    is_held,
    release,
)
from leadout.engine.server import Server
from support.full_server import PLAIN, PLAIN_TOKENS, FullServer, plain_answers
from support.odd_requests import MAX_LENGTH, lost, odd_requests, send_all
from support.processes import family_of, wait_until_gone

COMBINATIONS, SEED, CLIENTS = 60, 23, 8


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> FullServer:
    return FullServer(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def bare(world: FullServer, run_engine: Any) -> list[list[int]]:
    """What vLLM answers without a drafter."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=PLAIN_TOKENS, ignore_eos=True)
    with run_engine(world.target, max_model_len=MAX_LENGTH, max_num_seqs=8) as llm:
        asked = [{"prompt_token_ids": prompt} for prompt in PLAIN]
        return [list(one.outputs[0].token_ids) for one in llm.generate(asked, params)]


@pytest.fixture(scope="module")
def server(world: FullServer, temporary: Path, bare: list[list[int]]) -> Iterator[Server]:
    with world.server("server", TMPDIR=str(temporary)) as running:  # after the bare engine has gone
        yield running


def test_a_server_lives_through_odd_requests(
    world: FullServer, server: Server, bare: list[list[int]]
) -> None:
    assert plain_answers(server.url) == bare
    answers = list(send_all(server.url, odd_requests(COMBINATIONS, SEED), CLIENTS))
    assert lost(answers) == []
    with urllib.request.urlopen(f"{server.url}/health", timeout=600) as response:
        assert response.status == 200
    assert plain_answers(server.url) == bare
    statuses = Counter(answer.status for answer in answers)
    # Most are valid: a server that refused everything would live as well.
    assert statuses["200"] > len(answers) / 2
    assert statuses["400"] > 20
    assert statuses["aborted"] >= 12
    # Live control, capture and the rest have met no error either.
    log = server.log.read_text()
    assert "is off after an error" not in log
    assert "Leadout ignores the seeds" in log
    assert "ends when it samples" not in log  # the warning under stock vLLM
    assert segment_paths(world.capture)


def wait_until(is_so: Callable[[], bool], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.nightly
def test_files_of_a_killed_server_are_removed_by_the_next_start(
    server: Server, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.delenv(SOCKETS, raising=False)
    place = temporary / PRIVATE
    another = place / "another-engine"  # one that runs: this process
    claim(another)
    family = family_of(server.processes[0])
    for process in family:
        os.kill(process.pid, signal.SIGKILL)
    assert wait_until_gone(family, seconds=600) == []
    # A killed process closes its files when its last thread has ended, a little later.
    wait_until(lambda: not any(is_held(path) for path in place.iterdir() if path != another))
    (sockets,) = place.glob("server-*")
    (engine,) = {path.parent for path in place.glob("*/*.json")}
    assert any(path.is_socket() for path in sockets.iterdir())
    assert {path.name for path in engine.iterdir()} > {"served-0.json", "capture-0.json"}
    memory = [SHARED_MEMORY / name for name in (engine / "shared-memory").read_text().split()]
    assert any(path.exists() for path in memory)

    started = Path(folder_for_sockets()[SOCKETS])  # as `leadout serve` does
    try:
        assert set(place.iterdir()) == {another, started}
        assert not any(path.exists() for path in memory)
    finally:
        release(started)
        release(another)
