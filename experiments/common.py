"""What several experiments share: paths, environment, result files, kills, throughput.

Import it before torch or vLLM: importing it sets the environment that the processes of an
experiment inherit.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from leadout.control.tuned_file import read_tuned, write_tuned
from leadout.models import fingerprint, last_part
from leadout.provenance import Provenance, RunStart

STARTED = RunStart.now()
ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "drafters" / "smollm2-135m-instruct-dflash"

# Tiny models, fault definitions and samples of the tests, as in pyproject.toml.
sys.path[:0] = [str(ROOT / each) for each in ("tests", "tests/unit/bench", "tests/unit/check")]

# Threads bound to cores fight with those of servers that wait and with the load generator.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# The model in the engine's own process: otherwise that process waits for it in a busy loop, on a
# core that the model needs.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}


def provenance(**models: Path | str) -> dict[str, Any]:
    """How the result of this script is made; `models` are folders by role, such as `drafter`."""
    found = {role.replace("_", " "): fingerprint(Path(each)) for role, each in models.items()}
    return Provenance.of_this_run(found, STARTED).model_dump()


def write_result(path: Path, result: dict[str, Any], **models: Path | str) -> None:
    """Write a result file with its provenance first, and print it."""
    text = json.dumps({"provenance": provenance(**models), **result}, indent=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(text)


def store_tuned(tuned: Path, path: Path) -> None:
    """Copy a file of `leadout tune` to the results, without the folders of this machine."""
    found = read_tuned(tuned)
    models = {
        part: model.model_copy(update={"name": last_part(model.name)})
        for part, model in (("target", found.target), ("drafter", found.drafter))
    }
    write_tuned(found.model_copy(update=models), path)


def link_states(earlier: Path, later: Path) -> None:
    """Give a run that has not started the target states that another run kept.

    Both runs must have the same samples, maximum length and target layer ids.
    """
    from leadout.train.run import STATES, WORK

    (later / WORK).mkdir(parents=True)
    for name in (STATES, Path(STATES).with_suffix(".marks").name):
        os.link(earlier / WORK / name, later / WORK / name)


def tokens_per_second(engine: Any, prompts: list[str], tokens: int) -> float:
    """Throughput of a `vllm.LLM` that writes `tokens` greedy tokens for each prompt at once."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    engine.generate(prompts, params, use_tqdm=False)
    return len(prompts) * tokens / (time.perf_counter() - started)


class KillableCommand(ABC):
    """A resumable `leadout` command as a process that is killed at random moments."""

    working: str  # what it does after its start, for the records: "answering", "training"

    def __init__(self, log: Path) -> None:
        self._log = log

    @abstractmethod
    def command_line(self) -> list[Any]:
        """The command line; called at every start."""

    @abstractmethod
    def progress(self) -> object:
        """Something that changes with the first piece of new work."""

    def start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self.command_line(), stdout=log, stderr=log, env={**os.environ, **ONE_THREAD}
            )

    def wait_for_progress(self, process: subprocess.Popen[bytes]) -> None:
        before = self.progress()
        while process.poll() is None and self.progress() == before:
            time.sleep(0.002)

    def run_to_the_end(self) -> tuple[float, float]:
        """Seconds until the first new work, and from there to the end."""
        started = time.monotonic()
        process = self.start()
        self.wait_for_progress(process)
        working = time.monotonic()
        if process.wait() != 0:
            raise RuntimeError(f"the command failed:\n{self._log.read_text()[-3000:]}")
        return working - started, time.monotonic() - working

    def kill_at(
        self, draw: random.Random, starting: float | None, working: float
    ) -> tuple[float, str]:
        """Start, and kill within `starting` seconds, or `working` seconds after new work began."""
        process = self.start()
        if starting is not None:
            delay = draw.uniform(0, starting)
        else:
            self.wait_for_progress(process)
            delay = draw.uniform(0, working)
        time.sleep(delay)
        if process.poll() is not None:
            raise RuntimeError("the command ended before its kill; give it more work")
        # The ranks of torchrun are in sessions of their own and would survive it.
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
        return delay, "starting" if starting is not None else self.working
