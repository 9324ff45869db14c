"""Whether servers can be up together, and what they are started with."""

import asyncio
import os
import random
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from leadout.console import Progress
from leadout.engine import server_turns
from leadout.engine.server import Server, free_port
from leadout.engine.server_turns import (
    KV_SPACE,
    Launch,
    choose_turns,
    machine_flags,
    started,
    thread_warning,
)
from leadout.pairing import read_sizes
from support.models import tiny_llama
from support.processes import family_of, new_processes

GIB = 2**30


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file({"weight": torch.zeros(250)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("available", "cache", "expected"),
    [(20 * GIB, "1", "slices"), (20 * GIB, "7", "single"), (6 * GIB, "1", "single")],
)
def test_servers_take_turns_together_if_memory_holds_them(
    available: int, cache: str, expected: str, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KV_SPACE, cache)
    # Stands for a machine with so much memory.
    monkeypatch.setattr(server_turns, "available_bytes", lambda: available)
    assert choose_turns(3, [weights], on_cpu=True) == expected


@pytest.mark.parametrize(
    ("stored", "dtype", "times"),
    [
        (torch.bfloat16, (), 1),
        (torch.bfloat16, ("--dtype", "auto"), 1),
        (torch.bfloat16, ("--dtype", "bfloat16"), 1),
        (torch.bfloat16, ("--dtype=float32",), 2),  # twice the size of the file
        (torch.float32, ("--dtype", "half"), 0.5),
        (torch.int8, ("--dtype", "float32"), 2.5 / 1.2),  # and the kernels' copies
        (torch.float8_e4m3fn, (), 2.5 / 1.2),
        (torch.int32, (), 2.5 / 1.2),  # eight weights in one
    ],
)
def test_memory_is_counted_in_the_type_that_is_served(
    stored: torch.dtype,
    dtype: tuple[str, ...],
    times: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KV_SPACE, "1")
    weights = torch.zeros(2**22, dtype=stored)
    save_file({"weight": weights}, tmp_path / "model.safetensors")
    weight_bytes = 1.2 * times * weights.nbytes
    for margin, expected in ((-1024, "single"), (1024, "slices")):
        # Stands for a machine with so much memory.
        available = 2 * (weight_bytes + 3 * GIB) + margin
        monkeypatch.setattr(server_turns, "available_bytes", lambda available=available: available)
        assert choose_turns(2, [tmp_path], True, dtype) == expected


def test_weights_of_unknown_size_are_served_one_at_a_time(tmp_path: Path) -> None:
    # A hub name of which only the configuration has been downloaded.
    (tmp_path / "config.json").write_text("{}")
    for on_cpu in (True, False):
        assert choose_turns(3, [tmp_path], on_cpu) == "single"


def test_servers_that_measure_their_own_steps_are_not_stopped(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_turns, "available_bytes", lambda: 30 * GIB)
    monkeypatch.setenv(KV_SPACE, "1")
    assert choose_turns(3, [weights], on_cpu=True, can_stop=False) == "waves"


def test_on_a_gpu_two_servers_share_the_memory_or_are_up_one_at_a_time(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stands for a GPU with so much free memory.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1300, 1300))
    assert choose_turns(2, [weights], on_cpu=False) == "single"
    for four in (("--tensor-parallel-size", "4"), ("-tp=2", "--pipeline_parallel_size", "2")):
        assert choose_turns(2, [weights], on_cpu=False, flags=four) == "waves"
        asked = (*four, "--gpu-memory-utilization=0.9")
        assert choose_turns(2, [weights], on_cpu=False, flags=asked) == "single"
    assert machine_flags(on_cpu=False, servers=2) == ["--gpu-memory-utilization", "0.45"]
    assert machine_flags(on_cpu=False, servers=1) == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "waves"),  # of 512 tokens, by its config
        (("--max-model-len", "100000"), "single"),
        (("--max-model-len", "100000", "-tp", "1000"), "waves"),
        (("--max-model-len", "100k"), "waves"),  # vLLM's own notation is not read
    ],
)
def test_on_a_gpu_each_server_holds_a_request_of_the_maximum_length(
    flags: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    cache = read_sizes(tmp_path).kv_values_per_token * 2 * 512
    free = int(2 * 1.2 * (server_turns.weight_bytes(tmp_path) + cache) / 0.8) + 1024
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))
    assert choose_turns(2, [tmp_path], on_cpu=False, flags=flags) == expected


def test_the_available_memory_is_read_from_the_kernel() -> None:
    assert server_turns.available_bytes() > GIB / 4


def test_a_limit_of_threads_that_servers_inherit_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = thread_warning(on_cpu=True)
    assert found is not None
    assert found.startswith("OMP_NUM_THREADS is 1, so every server computes on 1 of 2 cores")
    assert thread_warning(on_cpu=False) is None
    for enough in ("2", "4", "2,1", ""):
        monkeypatch.setenv("OMP_NUM_THREADS", enough)
        assert thread_warning(on_cpu=True) is None
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert thread_warning(on_cpu=True) is None


def test_processes_that_are_seeded_alike_choose_different_ports() -> None:
    ports = []
    for _ in range(2):
        random.seed(0)  # as every engine does in its process
        ports.append([free_port() for _ in range(5)])
    assert ports[0] != ports[1]


@pytest.mark.timeout(120)
def test_ctrl_c_does_not_wait_for_a_server_to_start(tmp_path: Path) -> None:
    # It never listens; a large model takes minutes until it does.
    launch = Launch("slow", [sys.executable, "-c", "import time; time.sleep(600)"], {})
    before = family_of(os.getpid())

    async def start() -> None:
        async with started([launch], [], tmp_path, Progress.silent()):
            raise AssertionError("it cannot be up")

    async def interrupt() -> None:
        starting = asyncio.create_task(start())
        while not (tmp_path / "slow.log").exists():
            await asyncio.sleep(0.1)
        starting.cancel()  # what asyncio makes of Ctrl-C
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(interrupt())
    assert new_processes(before) == []


# Stands for a server that takes a second to stop.
SLOW_TO_STOP = """
import signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

def stop(*_):
    time.sleep(1)
    sys.exit()

signal.signal(signal.SIGTERM, stop)
HTTPServer(("127.0.0.1", int(sys.argv[-1])), Healthy).serve_forever()
"""


@pytest.mark.timeout(120)
def test_connections_are_closed_while_a_server_stops(tmp_path: Path) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    async def stop() -> int:
        async with Server([sys.executable, "-c", SLOW_TO_STOP], log=tmp_path / "log"):
            counting = asyncio.create_task(count_turns())
            await asyncio.sleep(0.05)
            before = turns
        counting.cancel()
        return turns - before

    assert asyncio.run(stop()) >= 10
