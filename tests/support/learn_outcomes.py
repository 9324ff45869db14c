"""Cycles of `leadout learn` that end in every way, in a sandbox that is searched afterwards.

All that a cycle can write to is below one folder: registry, work folder, temporary files, home,
working directory, and what it prints.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from leadout.learn.work_folder import CYCLE
from leadout.shards import Sample
from leadout.train.run import WORK
from support.learn_world import NEW, World, requests, start, write_capture
from support.marker import Marker, files_with

REQUESTS = 150
MARKERS = tuple(Marker.of_ids(seed, 250) for seed in range(8))
# The exit codes, and the flags that make a cycle end so.
OUTCOMES: dict[str, tuple[tuple[int, ...], tuple[object, ...]]] = {
    "published": ((0,), ("--tokens", 12_000)),
    "rejected": ((1,), ("--tokens", 100, "--gain", 0.5)),
    "too little traffic": ((3,), ("--tokens", 100, "--min-requests", 1000)),
    "killed": ((-signal.SIGKILL,), ("--tokens", 400_000)),
    "interrupted": ((130,), ("--tokens", 400_000)),
}


def marked(samples: Sequence[Sample]) -> list[Sample]:
    """These requests with markers in prompts and answers."""
    return [
        sample.model_copy(
            update={
                # Different prompts: of equal ones only the last is used.
                "prompt": [*sample.prompt[:2], *MARKERS[number % len(MARKERS)].ids],
                "response": [*sample.response, *MARKERS[(number + 1) % len(MARKERS)].ids],
            }
        )
        for number, sample in enumerate(samples)
    ]


@dataclass(frozen=True)
class Ended:
    """How a cycle ended, and the files outside the captured traffic with a marker."""

    code: int
    output: str
    searched: int
    found: list[Path]
    left: list[str]  # files of text or states in the work folder


class Sandbox:
    """A registry and captured traffic with markers in prompts and answers."""

    def __init__(self, world: World, folder: Path) -> None:
        self.folder, self._world = folder, world
        for name in ("tmp", "home", "cwd"):
            (folder / name).mkdir(parents=True)
        self.registry = start(world, folder / "registry").folder
        asked = marked(requests(NEW, REQUESTS))
        self.traffic = write_capture(folder / "traffic", world.target, asked)

    @property
    def environment(self) -> dict[str, str]:
        home = str(self.folder / "home")
        return {
            **os.environ,
            "TMPDIR": str(self.folder / "tmp"),
            "HOME": home,
            "XDG_CACHE_HOME": f"{home}/.cache",
            "HF_HOME": f"{home}/hf",
        }

    def run(self, outcome: str, *, seconds: float = 900.0) -> Ended:
        """One cycle that ends so; `killed` and `interrupted` are hit while they train."""
        codes, flags = OUTCOMES[outcome]
        work = self.folder / "work"
        words = ["learn", self._world.target, "--registry", self.registry, "--work", work]
        words += ["--traffic", self.traffic, "--replay", self._world.data.folder]
        words += ["--learning-rate", 1e-2]
        words += [] if "--min-requests" in flags else ["--min-requests", 20]
        log = self.folder / f"{outcome.replace(' ', '-')}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "leadout", *map(str, [*words, *flags])],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.folder / "cwd",
                start_new_session=True,
            )
            if outcome in ("killed", "interrupted"):
                self._wait_for_training(process, work, seconds)
                is_kill = outcome == "killed"
                os.kill(process.pid, signal.SIGKILL if is_kill else signal.SIGINT)
            code = process.wait(seconds)
        assert code in codes, log.read_text()[-3000:]
        self._wait_for_remover(work, seconds=600)
        found, searched = files_with(MARKERS, [self.folder], [self.traffic])
        return Ended(code, log.read_text(), searched, found, text_in(work))

    def _wait_for_training(
        self, process: subprocess.Popen[bytes], work: Path, seconds: float
    ) -> None:
        log, deadline = work / WORK / "log.jsonl", time.monotonic() + seconds
        while not ((work / CYCLE).exists() and log.exists() and log.read_bytes().count(b"\n") > 3):
            assert process.poll() is None, "the cycle ended before it trained"
            assert time.monotonic() < deadline, "the cycle did not train in time"
            time.sleep(0.05)
        # The text is there, so that the search could find it.
        assert files_with(MARKERS, [work])[0]

    @staticmethod
    def _wait_for_remover(work: Path, seconds: float) -> None:
        """A killed process cannot wait for the one that cleans up after it."""
        deadline = time.monotonic() + seconds
        while text_in(work) and time.monotonic() < deadline:
            time.sleep(0.05)


def text_in(work: Path) -> list[str]:
    """Files that only exist while a cycle runs."""
    names = ("mix/*", "capture/*", f"{WORK}/states.*")
    return sorted(path.name for name in names for path in work.glob(name) if path.is_file())
