"""Learners on a ring that end in every way, in a sandbox that is searched afterwards.

All that a learner can write to is below one folder: registry, work folder, temporary files, home,
working directory with its core files, and what it prints.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from support.learn_outcomes import MARKERS
from support.learn_world import World
from support.marker import Marker, files_with
from support.served_world import BASE_SEQUENCES

SECONDS = 600.0
# The exit code of each outcome, and the flags that make a learner end so.
OUTCOMES: dict[str, tuple[int, tuple[object, ...]]] = {
    "published": (0, ("--cycles", 1, "--tokens", 12_000, "--base-loss", 0.9)),
    "rejected": (1, ("--cycles", 1, "--tokens", 100, "--gain", 0.5)),
    "stopped": (0, ("--tokens", 4_000_000)),
    "killed": (-signal.SIGKILL, ("--tokens", 4_000_000)),
    "aborted": (-signal.SIGABRT, ("--tokens", 4_000_000)),
}
SIGNALS = {"stopped": signal.SIGTERM, "killed": signal.SIGKILL, "aborted": signal.SIGABRT}
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


# Before a command: it may write core files, of any size that the system allows.
WITH_CORE_FILES = ("sh", "-c", 'ulimit -S -c "$(ulimit -H -c)"; exec "$0" "$@"')


class ServedLearner:
    """`leadout learn --states` in a sandbox."""

    def __init__(self, world: World, ring: Path, registry: Path, folder: Path) -> None:
        self.folder, self.work, self.log = folder, folder / "work", folder / "log"
        self._environment = sandboxed(folder)
        words = ["learn", world.target, "--registry", registry, "--work", self.work]
        words += ["--states", ring, "--replay", world.data.folder, "--json"]
        words += ["--min-requests", 20, "--learning-rate", 1e-2]
        words += ["--base-sequences", BASE_SEQUENCES]
        self._command = [sys.executable, "-c", RUN, *map(str, words)]

    def run(self, outcome: str) -> str:
        """What it prints until it has ended so; signals are sent while it trains."""
        code, flags = OUTCOMES[outcome]
        with self.log.open("wb") as output:
            process = subprocess.Popen(
                [*WITH_CORE_FILES, *self._command, *map(str, flags)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self.folder / "cwd",
                start_new_session=True,
            )
        if outcome in SIGNALS:
            self._wait_for_training(process)
            os.kill(process.pid, SIGNALS[outcome])
        found = process.wait(SECONDS)
        printed = self.log.read_text()
        assert found == code, printed[-3000:]
        return printed

    def _wait_for_training(self, process: subprocess.Popen[bytes]) -> None:
        log, deadline = self.work / "run" / "log.jsonl", time.monotonic() + SECONDS
        while not (log.exists() and log.read_bytes().count(b"\n") > 3):
            assert process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert files_with(MARKERS, [self.folder])[0] == []  # also while it trains


def sandboxed(folder: Path) -> dict[str, str]:
    """Variables for a process that writes below this folder only; its working directory is made."""
    for name in ("tmp", "home", "cwd"):
        (folder / name).mkdir(parents=True)
    home = str(folder / "home")
    return {
        **os.environ,
        "TMPDIR": str(folder / "tmp"),
        "HOME": home,
        "XDG_CACHE_HOME": f"{home}/.cache",
        "HF_HOME": f"{home}/hf",
    }


def leaves_core_files(folder: Path, markers: Sequence[Marker] = MARKERS) -> bool:
    """Whether markers in the memory of a process that aborts here can be found in a file."""
    folder.mkdir()
    program = "import array, os, sys; kept = array.array('i', map(int, sys.argv[1:])); os.abort()"
    ids = [str(each) for marker in markers for each in marker.ids]
    subprocess.run(
        [*WITH_CORE_FILES, sys.executable, "-c", program, *ids],
        cwd=folder,
        capture_output=True,
        check=False,
    )
    return bool(files_with(markers, [folder])[0])
