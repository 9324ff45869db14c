"""However learning from served states ends, no file has anything that users wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.learn_outcomes import MARKERS, REQUESTS
from support.learn_world import NEW, World, requests, start
from support.marker import files_with
from support.served_world import Ring, ring_of

SECONDS = 600.0
# A run of the command that says at its end what it had imported, limits and memory included.
RUN = """
import resource, sys
from leadout.cli.app import app
try:
    app(sys.argv[1:])
finally:
    engines = [name for name in sys.modules if name.split(".")[0] == "vllm"]
    models = [name for name in sys.modules if name.startswith("transformers.models.llama.modeling")]
    print("imported:", engines + models, file=sys.stderr)
    print("core:", resource.getrlimit(resource.RLIMIT_CORE), file=sys.stderr)
    print("dumpable:", __import__("ctypes").CDLL(None).prctl(3), file=sys.stderr)
"""


@pytest.fixture
def ring(world: World) -> Iterator[Ring]:
    with ring_of(world) as made:
        made.serve(
            [
                sample.model_copy(
                    update={
                        "prompt": [*sample.prompt[:2], *MARKERS[number % len(MARKERS)].ids],
                        "response": [*sample.response, *MARKERS[(number + 1) % len(MARKERS)].ids],
                    }
                )
                for number, sample in enumerate(requests(NEW, REQUESTS))
            ]
        )
        yield made


class Learner:
    """`leadout learn --states` in a sandbox: all that it can write to is below one folder."""

    def __init__(self, world: World, ring: Ring, folder: Path, *flags: object) -> None:
        self.folder, self.work = folder, folder / "work"
        for name in ("tmp", "home", "cwd"):
            (folder / name).mkdir(parents=True)
        registry = start(world, folder / "registry").folder
        words = ["learn", world.target, "--registry", registry, "--work", self.work]
        words += ["--states", ring.folder, "--replay", world.data.folder, "--json"]
        words += ["--min-requests", 20, "--learning-rate", 1e-2, "--base-sequences", 20]
        home = str(folder / "home")
        environment = {
            **os.environ,
            "TMPDIR": str(folder / "tmp"),
            "HOME": home,
            "XDG_CACHE_HOME": f"{home}/.cache",
            "HF_HOME": f"{home}/hf",
        }
        self.log = folder / "log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN, *map(str, [*words, *flags])],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder / "cwd",
                start_new_session=True,
            )

    def wait_for_training(self) -> None:
        log, deadline = self.work / "run" / "log.jsonl", time.monotonic() + SECONDS
        while not (log.exists() and log.read_bytes().count(b"\n") > 3):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert files_with(MARKERS, [self.folder])[0] == []  # also while it trains


def test_a_rejected_candidate_leaves_no_text(world: World, ring: Ring, tmp_path: Path) -> None:
    flags = ("--cycles", 1, "--tokens", 100, "--gain", 0.5)
    learner = Learner(world, ring, tmp_path / "rejected", *flags)
    code, output = learner.process.wait(SECONDS), learner.log.read_text()
    assert code == 1, output[-3000:]
    found, searched = files_with(MARKERS, [learner.folder])
    assert found == []
    assert searched > 10
    assert '"verdict":"rejected"' in output
    # It has neither the engine nor the target's model class, and leaves no core.
    assert "imported: []" in output
    assert "core: (0, 0)" in output
    assert "dumpable: 0" in output


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_learner_that_ends_in_training_leaves_no_text(
    world: World, ring: Ring, tmp_path: Path, sent: signal.Signals
) -> None:
    """A signal to end is no failure of a learner that runs until it is stopped."""
    learner = Learner(world, ring, tmp_path / "ended", "--tokens", 4_000_000)
    learner.wait_for_training()
    os.kill(learner.process.pid, sent)
    code = learner.process.wait(SECONDS)
    assert code == (0 if sent == signal.SIGTERM else -sent), learner.log.read_text()[-3000:]
    assert files_with(MARKERS, [learner.folder])[0] == []
    left = {path.name for path in learner.work.rglob("*") if path.is_file()}
    assert not {name for name in left if name.endswith(".jsonl")} - {"log.jsonl"}
    assert not (learner.work / "run" / "states.bin").exists()
    if sent == signal.SIGTERM:
        assert "stopped; the served text was in memory only" in learner.log.read_text()
