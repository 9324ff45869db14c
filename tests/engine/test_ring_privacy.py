"""A server and the learners on its ring leave nothing that users wrote in a file, log or core."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from leadout.engine.server import Server
from leadout.registry import Registry
from support.http_load import answer
from support.learn_outcomes import MARKERS
from support.learn_world import ANSWER, World, make_world, start
from support.marker import files_with
from support.model_infos import copy_model_infos
from support.served_outcomes import SECONDS, WITH_CORE_FILES, ServedLearner, sandboxed

FLAGS = ("--dtype", "float32", "--enforce-eager", "--served-model-name", "tiny")
FLAGS += ("--max-model-len", "128", "--max-num-seqs", "8", "--no-enable-prefix-caching")
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
# The file in which vLLM notes its statistics is searched, too.
ENVIRONMENT |= {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "0"}
REQUESTS = 80


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def ring() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="leadout-test-", dir="/dev/shm"))
    yield folder / "ring"
    shutil.rmtree(folder)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not `tmp_path`: the names of vLLM's sockets below it would be too long."""
    found = Path(tempfile.mkdtemp(prefix="leadout-"))
    yield found
    shutil.rmtree(found)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_server_and_learners_leave_no_text(world: World, ring: Path, folder: Path) -> None:
    registry = start(world, folder / "registry")
    environment = sandboxed(folder / "server") | ENVIRONMENT
    copy_model_infos(Path(environment["XDG_CACHE_HOME"]))
    command = [sys.executable, "-m", "leadout", "serve", str(world.target), *FLAGS]
    command += ["--registry", str(registry.folder)]
    command += ["--learn-states", str(ring), "--learn-rate", "1", "--learn-ring-gib", "0.05"]
    there = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder / "server" / "cwd")]
    log = folder / "server" / "log"
    with Server([*there, *WITH_CORE_FILES, *command], log=log, environment=environment) as server:
        prompts = [[place, *MARKERS[place % len(MARKERS)].ids] for place in range(REQUESTS)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda prompt: answer(server.url, prompt, ANSWER), prompts))
        assert files_with(MARKERS, [ring])[0]  # in memory
        base: Path | None = None
        for outcome in ("rejected", "published", "killed"):
            learner = ServedLearner(world, ring, registry.folder, folder / outcome)
            if base is not None:  # the first one has computed the states of replayed data
                shutil.copytree(base, learner.work / "base")
            learner.run(outcome)
            base = learner.work / "base"
            assert files_with(MARKERS, [folder])[0] == [], outcome
        assert registry.versions() == [1, 2]
        wait_until(lambda: "swapped" in {entry.event for entry in registry.ledger()})
        assert answer(server.url, prompts[0], ANSWER)
        for pid in server.processes:  # it crashes
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        server.wait_until_ended(SECONDS)
    found, searched = files_with(MARKERS, [folder])
    assert found == []
    assert searched > 20
    assert list((folder / "server" / "cwd").iterdir()) == []  # no core file
    assert Registry(registry.folder).require_pointer().version == 2
