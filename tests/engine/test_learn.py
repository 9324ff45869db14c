"""`leadout learn` with the real engine: training in two processes, and the lossless check."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leadout.registry import Registry
from support.learn_world import NEW, World, make_world, requests, start, write_capture

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def test_two_processes_learn_and_the_candidate_is_lossless_in_vllm(
    world: World, tmp_path: Path
) -> None:
    registry = start(world, tmp_path / "registry")
    capture = write_capture(tmp_path / "capture", world.target, requests(NEW, 150))
    words = ["learn", world.target, "--registry", registry.folder, "--traffic", capture]
    words += ["--replay", world.data.folder, "--tokens", 15_000, "--min-requests", 20]
    words += ["--learning-rate", 1e-2, "--json"]
    ended = subprocess.run(
        [*TORCHRUN, "-m", "leadout", *map(str, words)], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    result: Any = json.loads(ended.stdout)  # one result, of the leading rank
    assert result["evidence"]["lossless"]["equal_texts"] == 16
    assert result["promoted"], result["decision"]["reasons"]
    pointer = Registry(registry.folder).pointer()
    assert pointer is not None
    assert pointer.version == 2
    assert registry.ledger()[-1].evidence["lossless"] is True
