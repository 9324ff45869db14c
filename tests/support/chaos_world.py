"""What the chaos test disturbs: replicas of a tiny target, a registry, and the disk under it."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

import psutil

from leadout.engine.admin import KEY
from leadout.engine.server import Server, free_port
from support.http_load import call
from support.models import ROOT, tiny_llama
from support.processes import family_of
from support.tiny_chat import tiny_tokenizer

SECRET = "a-key-for-the-tests"
TOKENS = 48
MODEL = "tiny"
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256")
FLAGS += ("--max-num-seqs", "8", "--served-model-name", MODEL)
# A small cache: one that fills up during the run would look like growing memory.
FLAGS += ("--num-gpu-blocks-override", "256")
# As in the Kubernetes example.
DRAIN = ("--shutdown-timeout", "120")
BODY = {"model": MODEL, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
BODY |= {"return_token_ids": True}
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
}
# Two tokens that are closer to each other than this may change places with the size of a batch.
MIN_GAP = 1e-3
STARTUP_SECONDS = 1200.0
TESTS = ROOT / "tests"


def make_target(folder: Path) -> Path:
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def bare_answers(llm: Any, prompts: int = 72) -> list[tuple[list[int], list[int]]]:
    """Prompts with the greedy answers of a vLLM engine without a drafter; none is a close call."""
    from vllm import SamplingParams

    draw = random.Random(0)
    asked = [[draw.randrange(5, 250) for _ in range(draw.randrange(4, 40))] for _ in range(prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], params)
    kept = []
    for prompt, answer in zip(asked, answers, strict=True):
        (output,) = answer.outputs
        gaps = []
        for likely in output.logprobs:
            first, second = sorted((each.logprob for each in likely.values()), reverse=True)[:2]
            gaps.append(first - second)
        if min(gaps) > MIN_GAP:
            kept.append((prompt, list(output.token_ids)))
    assert len(kept) > prompts / 2
    return kept


class Disk:
    """The folder for registry and captured traffic.

    A small file system in memory where the system lets us mount one. Elsewhere, and for slowness,
    `fake_disk` stands for it inside the servers.
    """

    def __init__(self, work: Path, is_mounted: bool) -> None:
        self.folder, self.is_mounted = work / "disk", is_mounted
        self._state, self._filler = work / "disk-state", self.folder / "filler"

    @property
    def environment(self) -> dict[str, str]:
        """For the processes that use the disk."""
        hook = [str(TESTS / "support" / "fake_disk"), os.environ.get("PYTHONPATH", "")]
        return {
            "PYTHONPATH": ":".join(filter(None, hook)),
            "FAKE_DISK_STATE": str(self._state),
            "FAKE_DISK_FOLDERS": str(self.folder),
        }

    @contextmanager
    def full(self) -> Iterator[None]:
        if not self.is_mounted:
            with self._in_state("full"):
                yield
            return
        try:
            with self._filler.open("wb", buffering=0) as file:
                for size in (1 << 20, 1 << 12, 1):
                    with suppress(OSError):
                        while file.write(bytes(size)) == size:
                            pass
            yield
        finally:
            self._filler.unlink()

    def slow(self, seconds: float) -> AbstractContextManager[None]:
        """Every file takes so much longer to open."""
        return self._in_state(f"slow {seconds}")

    def stale(self) -> AbstractContextManager[None]:
        """No server can read a version."""
        return self._in_state("stale")

    @contextmanager
    def _in_state(self, state: str) -> Iterator[None]:
        self._state.write_text(state)
        try:
            yield
        finally:
            self._state.unlink()


@contextmanager
def disk(work: Path, *, may_mount: bool, mebibytes: int = 192) -> Iterator[Disk]:
    folder = work / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={mebibytes}m,mode=0700", "leadout-chaos", str(folder)]
    is_mounted = False
    if may_mount and shutil.which("mount"):
        is_mounted = subprocess.run(["mount", *options], capture_output=True).returncode == 0
    try:
        yield Disk(work, is_mounted)
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Replica:
    """A `leadout serve` on one port, restarted by the test as Kubernetes would."""

    def __init__(
        self, name: str, target: Path, registry: Path, capture: Path, work: Path, disk: Disk
    ) -> None:
        self.name, self.port, self.starts = name, free_port(), 0
        self._work = work
        self._command = [sys.executable, "-m", "leadout", "serve", str(target), *FLAGS, *DRAIN]
        self._command += ["--registry", str(registry), "--capture", str(capture)]
        self._environment = {**ONE_THREAD, **disk.environment, KEY: SECRET}
        self._server: Server | None = None
        # Process ids of "server", "engine" and, where the model runs in one of its own, "worker".
        self.processes: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    def start(self) -> None:
        self.starts += 1
        self._server = Server(
            self._command,
            log=self._work / f"{self.name}-{self.starts}.log",
            environment=self._environment,
            startup_seconds=STARTUP_SECONDS,
            port=self.port,
        )
        self._server.start()

    def wait_until_ready(self) -> None:
        self.server.wait_until_healthy()
        first = self.server.processes[0]
        self.processes = {"server": first}
        for process in family_of(first):
            for role, title in (("engine", "EngineCore"), ("worker", "VLLM::Worker")):
                if title in process.command:
                    self.processes[role] = process.pid
        assert "engine" in self.processes, family_of(first)

    def wait_until_ended(self, seconds: float) -> int:
        code = self.server.wait_until_ended(seconds)
        self.processes = {}
        self.server.stop()
        return code

    def stop(self) -> None:
        self.processes = {}
        if self._server is not None:
            self._server.stop()

    def version(self) -> int | None:
        """The version in service; None if the server does not answer."""
        try:
            status, report = call(f"{self.url}/leadout/drafter", key=SECRET)
        except OSError:
            return None
        return int(report["version"]) if status == 200 else None

    def swap(self, version: int) -> int:
        return call(f"{self.url}/leadout/swap", {"version": version}, SECRET)[0]


@dataclass(frozen=True)
class Sample:
    when: float  # monotonic time
    mebibytes: float  # resident
    descriptors: int


@dataclass(frozen=True)
class Growth:
    """One process, after its warm-up and at its end; medians over a part of its life each."""

    process: str
    seconds: float
    mebibytes: tuple[float, float]
    descriptors: tuple[float, float]

    def is_within(self, share: float, descriptors: int) -> bool:
        (memory, last_memory), (files, last_files) = self.mebibytes, self.descriptors
        return last_memory <= memory * (1 + share) and last_files <= files + descriptors


class Resources:
    """Memory and descriptors of all replicas, sampled for as long as the `with` block lasts."""

    SECONDS_BETWEEN = 2.0

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._lives: dict[str, list[Sample]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="chaos-resources")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(self.SECONDS_BETWEEN):
            for replica in self._replicas:
                for role, pid in list(replica.processes.items()):
                    with suppress(psutil.Error, FileNotFoundError):
                        process = psutil.Process(pid)
                        used = process.memory_info().rss / 2**20
                        sample = Sample(time.monotonic(), used, process.num_fds())
                        name = f"{role} of replica {replica.name}, start {replica.starts}"
                        self._lives.setdefault(name, []).append(sample)

    def growth(self, min_seconds: float) -> list[Growth]:
        return [
            found
            for name, samples in self._lives.items()
            if (found := growth_of(name, samples, min_seconds)) is not None
        ]


def growth_of(name: str, samples: Sequence[Sample], min_seconds: float) -> Growth | None:
    """The second quarter of a life against its last one; None for a life that is too short."""
    seconds = samples[-1].when - samples[0].when
    quarter = len(samples) // 4
    if seconds < min_seconds or quarter == 0:
        return None
    parts = samples[quarter : 2 * quarter], samples[-quarter:]
    first, last = ([each.mebibytes for each in part] for part in parts)
    first_files, last_files = ([each.descriptors for each in part] for part in parts)
    return Growth(
        name,
        round(seconds, 1),
        (round(median(first), 1), round(median(last), 1)),
        (median(first_files), median(last_files)),
    )
