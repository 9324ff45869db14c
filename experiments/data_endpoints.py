"""Two data servers, one killed and one paused for a minute: the data of an undisturbed run.

The target is tiny and random, in float32; half of the answers are greedy, the others are sampled
with a seed for each request. The second server is paused after a quarter of the samples, the first
one is killed after half of them, and the second one resumes a minute after it was paused:

    python experiments/data_endpoints.py --out results/data/endpoints.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import ONE_THREAD, write_result
from data_kill import compare
from leadout.data.manifest import DataFolder, shard_path
from leadout.engine.server import Server, server_command
from support.prompts import PROMPTS
from support.tiny_chat import write_tiny_chat_target

CONVERSATIONS = 120  # every second one of two turns
SAMPLES = 180
PAUSE_SECONDS = 60.0
# On a CPU, vLLM 0.32 cannot sample with seeds while it computes prompts in chunks.
SERVER_FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "400"),
    *("--max-num-seqs", "4", "--no-enable-chunked-prefill"),
)
FLAGS = (
    *("--max-new-tokens", "32", "--max-length", "400", "--concurrency", "4"),
    *("--greedy-share", "0.5", "--temperature", "0.7", "--top-p", "1"),
)


class Job:
    """`leadout data` as a process that writes into one folder."""

    def __init__(self, folder: Path, out: str, servers: list[Server]) -> None:
        self.out = folder / out
        self.log = folder / f"{out}.log"
        self.started = time.monotonic()
        words = [sys.executable, "-m", "leadout", "data", folder / "target", "--out", self.out]
        words += ["--prompts", folder / "asked.jsonl", *FLAGS]
        words += [word for server in servers for word in ("--endpoint", server.url)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                list(map(str, words)), stdout=log, stderr=log, env={**os.environ, **ONE_THREAD}
            )

    @property
    def samples(self) -> int:
        path = shard_path(self.out, 1, 1)
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for(self, samples: int) -> None:
        while self.samples < samples:
            if self._process.poll() is not None:
                raise RuntimeError(f"the job ended too early:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.02)

    def wait(self) -> float:
        """Seconds since the start."""
        if self._process.wait(900) != 0:
            raise RuntimeError(f"the job failed:\n{self.log.read_text()[-3000:]}")
        return time.monotonic() - self.started

    def notices(self, servers: list[Server]) -> list[str]:
        """What the job said of its servers, with their numbers in place of their addresses."""
        lines = [line for line in self.log.read_text().splitlines() if "http://" in line]
        for number, server in enumerate(servers, start=1):
            lines = [line.replace(server.url, f"server {number}") for line in lines]
        return [line.removeprefix("leadout data: ") for line in lines if "server " in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = write_tiny_chat_target(folder / "target")
        write_prompts(folder / "asked.jsonl")
        environment = {**ONE_THREAD, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        servers = [
            Server(
                server_command(target, SERVER_FLAGS),
                log=folder / f"server-{number}.log",
                environment=environment,
            )
            for number in (1, 2)
        ]
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait_until_healthy()
            result = measure(folder, servers)
        finally:
            for server in servers:
                server.stop()
    write_result(arguments.out, result)
    sys.exit(0 if result["equal"] else 1)


def measure(folder: Path, servers: list[Server]) -> dict[str, Any]:
    undisturbed = Job(folder, "undisturbed", servers)
    undisturbed_seconds = undisturbed.wait()
    print(f"undisturbed: {undisturbed_seconds:.1f} s", flush=True)

    first, second = servers
    job = Job(folder, "disturbed", servers)
    events = []

    def event(what: str) -> None:
        seconds = round(time.monotonic() - job.started, 1)
        events.append({"event": what, "seconds": seconds, "samples": job.samples})
        print(events[-1], flush=True)

    job.wait_for(SAMPLES // 4)
    second.pause()
    paused = time.monotonic()
    event("server 2 paused")
    job.wait_for(SAMPLES // 2)
    for pid in first.processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    event("server 1 killed")
    time.sleep(max(0.0, paused + PAUSE_SECONDS - time.monotonic()))
    event("server 2 resumed")
    second.resume()
    seconds = job.wait()
    event("end")
    data, expected = DataFolder(job.out), DataFolder(undisturbed.out)
    return {
        "undisturbed_seconds": round(undisturbed_seconds, 1),
        "disturbed_seconds": round(seconds, 1),
        "pause_seconds": PAUSE_SECONDS,
        "events": events,
        "notices": job.notices(servers),
        "greedy": sum(sample.temperature == 0 for sample in expected.samples()),
        "sampled": sum(sample.temperature > 0 for sample in expected.samples()),
        "errors": data.manifests[0].failed,
        **renamed(compare(expected, data)),
    }


def renamed(found: dict[str, object]) -> dict[str, object]:
    return {
        "samples_disturbed" if name == "samples_after_kills" else name: value
        for name, value in found.items()
    }


def write_prompts(path: Path) -> None:
    with path.open("w") as file:
        for number in range(CONVERSATIONS):
            turns = [f"{number}. {PROMPTS[number % len(PROMPTS)]}", "And then?"]
            file.write(json.dumps({"turns": turns[: 1 + number % 2]}) + "\n")


if __name__ == "__main__":
    main()
