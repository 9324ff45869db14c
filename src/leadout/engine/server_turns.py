"""Servers that are measured against each other: how they are started, and how they take turns.

- `slices`: all servers are up and loaded, and all but one are stopped (SIGSTOP), so that a slow
  moment of the machine affects all of them alike.
- `waves`: all servers are up, and one after the other is loaded.
- `single`: one server at a time is up, because memory does not hold more.

Stopping needs servers that can be stopped at any moment, which is known of CPU servers only.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from leadout.checkpoints.store import read_header, weight_files
from leadout.console import Progress
from leadout.engine.installation import installed_distribution
from leadout.engine.load_test import (
    BatchLoad,
    DraftCounters,
    LoadRequest,
    RunningClock,
    ServerLoad,
    api_key_of,
    client_session,
    flag_value,
    read_counters,
)
from leadout.engine.server import Server
from leadout.errors import LeadoutError
from leadout.pairing import read_sizes, read_target
from leadout.provenance import THREADS

if TYPE_CHECKING:
    from aiohttp import ClientSession

Turns = Literal["slices", "waves", "single"]
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"  # in GiB, read on CPUs only
SMALL_KV_SPACE = "1"  # vLLM's default is most of the memory, for each of several servers
STARTUP_SECONDS = 1800.0  # large models load slowly; a server that dies is noticed at once
# Compilation takes minutes on CPUs, and vLLM's own kernels are faster.
CPU_FLAGS = ("--enforce-eager", "--compilation-config", '{"custom_ops": ["all"]}')
_GPU_MEMORY = 0.9  # for all servers together, a little below vLLM's default for one
_GPU_MEMORY_FLAG = "--gpu-memory-utilization"
_GIB = 2**30
_PROCESS_BYTES = 2 * _GIB  # of a server, besides weights and cache
_WEIGHT_FACTOR = 1.2  # activations, and weights that are stored twice while loading
# On CPUs vLLM keeps quantized weights beside the copies that its kernels read. Measured: 2.5 times.
_QUANTIZED_FACTOR = 2.5
_FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4}  # safetensors names others like I8, I32, F8_E4M3
# By the values of vLLM's --dtype; with others weights have the type of the checkpoint.
_SERVED_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started; `environment` is in addition to ours."""

    name: str
    command: list[str]
    environment: dict[str, str]


class RunningServer:
    """A running server, with the clock of the time for which it was allowed to run."""

    def __init__(self, name: str, server: Server, session: ClientSession) -> None:
        self.label = f"{name} (log: {server.log})"
        self._server, self._session = server, session
        self._clock = RunningClock()

    def pause(self) -> None:
        self._server.pause()
        self._clock.stop()

    def resume(self) -> None:
        self._clock.start()
        self._server.resume()

    async def run_for(self, seconds: float) -> None:
        """From stopped to stopped."""
        self.resume()
        await asyncio.sleep(seconds)
        self.pause()

    def load(self, request: LoadRequest) -> ServerLoad:
        return ServerLoad(self._session, self._server.url, request, self._clock, self.label)

    def batch(self, bodies: Sequence[dict[str, object]]) -> BatchLoad:
        return BatchLoad(self._session, self._server.url, bodies, self.label)

    def processor_seconds(self) -> float:
        return self._server.processor_seconds()

    async def counters(self) -> DraftCounters:
        return await read_counters(self._session, self._server.url)


@asynccontextmanager
async def started(
    launches: Sequence[Launch], flags: Sequence[str], logs: Path, progress: Progress
) -> AsyncIterator[dict[str, RunningServer]]:
    """Start servers one after the other; an idle one takes no processor time.

    `flags` are those of all servers: an API key among them is sent with every request.
    """
    logs.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(client_session(api_key_of(flags)))
        servers = {}
        if warning := thread_warning(on_cpu=installed_distribution() == "vllm-cpu"):
            progress.say(warning)
        advance = progress.stage("start servers", len(launches))
        for launch in launches:
            server = await stack.enter_async_context(
                Server(
                    launch.command,
                    log=logs / f"{launch.name}.log",
                    environment=launch.environment,
                    startup_seconds=STARTUP_SECONDS,
                )
            )
            servers[launch.name] = RunningServer(launch.name, server, session)
            advance(note=launch.name)
        yield servers


def thread_warning(on_cpu: bool) -> str | None:
    """What to know about servers that inherit a limit of threads, as shells often set one."""
    limit, cores = os.environ.get(THREADS, ""), len(os.sched_getaffinity(0))
    if not on_cpu or not limit.isdecimal() or int(limit) >= cores:
        return None
    return (
        f"{THREADS} is {limit}, so every server computes on {limit} of {cores} cores; unset it "
        "unless your servers run like that."
    )


def choose_turns(
    servers: int,
    folders: Sequence[Path],
    on_cpu: bool,
    flags: Sequence[str] = (),
    *,
    can_stop: bool = True,
) -> Turns:
    """Together if the memory that is free holds all servers, otherwise one at a time.

    `folders` are those of the target and of the drafters. Weights that are not downloaded yet have
    an unknown size, so their servers are started one at a time. `flags` are the user's: they may
    divide the weights among several devices, or give each server too much of the memory.
    """
    sizes = [weight_bytes(folder) for folder in folders]
    if not all(sizes):
        return "single"
    weights = sum(sizes)
    if not on_cpu:
        import torch

        asked = flag_value(flags, _GPU_MEMORY_FLAG)
        if not torch.cuda.is_available() or (asked and not _leaves_room(asked, servers)):
            return "single"
        free, _ = torch.cuda.mem_get_info()
        # A cache that is divided holds fewer requests, but vLLM starts only if the longest one
        # fits; a tenth of the memory is left to each besides.
        own = _WEIGHT_FACTOR * weights + _longest_request_bytes(folders[0], flags)
        own /= devices_of(flags)
        fits = servers * (own + 0.1 * free) < free
        return "waves" if fits else "single"
    cache = float(os.environ.get(KV_SPACE, SMALL_KV_SPACE)) * _GIB
    on_this_cpu = sum(_served_bytes(folder, flag_value(flags, "--dtype")) for folder in folders)
    needed = servers * (on_this_cpu + cache + _PROCESS_BYTES)
    if needed >= available_bytes():
        return "single"
    return "slices" if can_stop else "waves"


def _leaves_room(asked: str, servers: int) -> bool:
    """Whether so many servers may each have this share of the memory."""
    try:
        return servers * float(asked) <= _GPU_MEMORY
    except ValueError:  # vLLM refuses it, with its own words
        return False


def _longest_request_bytes(target: Path, flags: Sequence[str]) -> float:
    """The KV cache of one request of the maximum length, with that of a drafter; 0: not known.

    An upper bound: layers with a window or a state instead of a cache count as attention.
    """
    try:
        per_token = read_sizes(target).kv_values_per_token
        longest = read_target(target).max_positions
    except LeadoutError:
        return 0.0
    asked = flag_value(flags, "--max-model-len")
    if asked is not None:  # maybe in vLLM's other notations, such as 16k
        longest = int(asked) if asked.isdecimal() else 0
    return _WEIGHT_FACTOR * 2.0 * per_token * (longest or 0)


def devices_of(flags: Sequence[str]) -> int:
    """How many devices a server with these flags divides its weights among."""
    devices = 1
    for names in (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp")):
        value = flag_value(flags, *names)
        # Anything but a number is refused by vLLM, with its own words.
        devices *= int(value) if value is not None and value.isdecimal() else 1
    return max(devices, 1)


def model_location(flags: Sequence[str]) -> tuple[str | None, str | None]:
    """The target's revision and the folder for downloads, as `models.local_folder` takes them."""
    return flag_value(flags, "--revision"), flag_value(flags, "--download-dir")


def machine_flags(on_cpu: bool, servers: int) -> list[str]:
    """Flags for this machine and so many servers at a time; the user's come later and win."""
    if on_cpu:
        return [*CPU_FLAGS]
    if servers == 1:
        return []
    # All of them share the same accelerators.
    return [_GPU_MEMORY_FLAG, f"{_GPU_MEMORY / servers:.2f}"]


def machine_environment() -> dict[str, str]:
    return {KV_SPACE: os.environ.get(KV_SPACE, SMALL_KV_SPACE)}


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(folder))


def _served_bytes(folder: Path, dtype: str | None) -> float:
    """The memory for a checkpoint's weights in a CPU server with this --dtype."""
    needed = 0.0
    for path in weight_files(folder):
        for tensor in read_header(path):
            count, stored = math.prod(tensor.shape), _FLOAT_BYTES.get(tensor.dtype)
            if stored is None:
                bits = int("".join(filter(str.isdigit, tensor.dtype.partition("_")[0])) or 8)
                needed += _QUANTIZED_FACTOR * count * bits / 8
            else:
                needed += _WEIGHT_FACTOR * count * _SERVED_BYTES.get(dtype or "", stored)
    return needed


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
