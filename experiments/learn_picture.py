"""Tokens per second of one server, second by second, while `leadout learn` replaces its drafter.

    python experiments/learn_picture.py TARGET PROMPTS_FOLDER WORK_FOLDER

A server of SmolLM2 with the shipped drafter answers a constant number of greedy requests at a time,
all of a kind that the drafter has never seen. Three phases, without a pause between them:

- before: requests that are held out, and not learnt from.
- learning: `leadout learn --states` is started on the same machine. It learns from the requests of
  this phase, evaluates the new version and publishes it; the server swaps it in. The phase ends
  when the server has the new version and the learner has ended.
- after: the held-out requests of the first phase again, in the same order.

Output tokens are counted by the server (`vllm:generation_tokens_total`) and read once a second. The
speeds before and after are means over slices of ten seconds, with 95% bootstrap intervals; the
first seconds of both phases, in which requests of the phase before them still run, are left out.
The server drafts a whole block at every step (no tuned file, no live control). Prefix caching is
off, so that the ring has the beginning of every request. The states of replayed data are made
before the clock starts. Without --data, 400 answers to prompts of the training sets are generated
first. Set OMP_NUM_THREADS=1 on two cores: server and learner then have one core each. With more
threads than cores, those of the server wait for each other, and it is several times slower. Takes
about 25 minutes on two idle cores; a second call continues after the last complete stage, and the
run is one stage.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

import result_charts
from common import ROOT, SHIPPED, write_result
from leadout.registry import FIRST
from leadout.stats import Interval, bootstrap
from learn_loop import (
    COUNTERS,
    KINDS,
    Learner,
    LearnRun,
    ask,
    require_promoted,
    served,
    served_drafter,
    start_registry,
)

OUT = ROOT / "results" / "learn" / "picture.json"
WAITING = "waiting for requests"  # the stage of a learner that reads the ring
SAMPLE_SECONDS = 1.0
SLICE_SECONDS = 10.0
SETTLE_SECONDS = 5.0  # of a phase, in which requests of the one before it still run
SWAP_SECONDS = 60.0  # after the learner's end
TOKENS = "vllm:generation_tokens_total"

Sample = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "prompts", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--data", type=Path, help="of `leadout data`; default: made here")
    parser.add_argument("--kind", choices=KINDS, default="tickets")
    parser.add_argument("--clients", type=int, default=4, help="requests at a time")
    parser.add_argument("--seconds", type=float, default=125.0, help="before, and after")
    parser.add_argument("--held-out", type=int, default=60, help="requests before and after")
    parser.add_argument("--min-requests", type=int, default=96, help="to train on")
    parser.add_argument("--tokens", type=int, default=60_000, help="to train on, with repetitions")
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--answers", type=int, default=400, help="of the data, if it is made here")
    parser.add_argument("--base-loss", type=float, default=0.1, help="bound of the gate")
    parser.add_argument("--ring", type=Path, default=Path("/dev/shm/leadout-learn-picture"))
    parser.add_argument("--out", type=Path, default=OUT)
    arguments, more = parser.parse_known_args()  # other flags go to `leadout learn`
    picture = Picture(arguments, more)
    picture.make_data()
    try:
        found = picture.stage("run", picture.run)
    finally:
        shutil.rmtree(arguments.ring, ignore_errors=True)
    result = summary(found, kind=arguments.kind, clients=arguments.clients)
    write_result(arguments.out, result, target=arguments.target, drafter=SHIPPED)
    arguments.out.with_suffix(".svg").write_text(result_charts.learn_picture(result))


class Picture(LearnRun):
    """A server that is measured before, during and after a cycle."""

    def __init__(self, arguments: Any, more: Sequence[str]) -> None:
        super().__init__(arguments, more)
        self.registry = self.work / "registry"

    def run(self) -> dict[str, Any]:
        settings = self.arguments
        shutil.rmtree(self.registry, ignore_errors=True)  # of a run that was interrupted
        shutil.rmtree(settings.ring, ignore_errors=True)
        start_registry(self.target, self.registry)
        held_out = self.prompts.measured(settings.kind, settings.held_out)
        traffic = self.prompts.sent(settings.kind, 100 * settings.min_requests)
        words = ("--registry", self.registry, "--learn-states", settings.ring)
        words += ("--learn-rate", 1, "--no-enable-prefix-caching")
        with served(self.target, self.work / "server.log", *words) as server:
            made = self._learner("replay-states", "--cycles", 0)
            if made.process.wait() != 0:
                sys.exit(f"the states of replayed data were not made:\n{made.log.read_text()}")
            load = Load(server.url, settings.clients, settings.answer_tokens)
            load.send(held_out, captured=False)
            with load.running(), sampled(server.url) as samples:
                began = time.monotonic()
                time.sleep(settings.seconds)
                learning = time.monotonic()
                load.send(traffic, captured=True)
                learner = self._learner("learner", "--cycles", 1)
                try:
                    swapped = _wait_for_swap(server.url, learner)
                    learnt = learner.result()
                finally:
                    learner.stop()
                ended = time.monotonic()
                load.send(held_out, captured=False)
                time.sleep(settings.seconds)
                last = time.monotonic()
            version = served_drafter(server.url)["version"]
        if version != learnt["version"]:
            sys.exit(f"version {learnt['version']} was rolled back to {version} while measured")
        return {
            "samples": [{**each, "second": each["second"] - began} for each in samples],
            "learner_started": learning - began,
            "swapped": swapped - began,
            "learner_ended": ended - began,
            "seconds": last - began,
            "requests": load.requests,
            "failed_requests": load.failed,
            "learnt_from_requests": learnt["adaptation"]["traffic_requests"],
            "training_seconds": 60 * learnt["adaptation"]["minutes"],
        }

    def _learner(self, name: str, *words: object) -> Learner:
        settings = self.arguments
        command = [self.target, "--states", settings.ring, "--registry", self.registry]
        command += ["--replay", self.data, "--work", self.work / "cycle"]
        command += ["--tokens", settings.tokens, "--min-requests", settings.min_requests]
        command += ["--base-loss", settings.base_loss]
        return Learner(self.work / f"{name}.log", *command, *words, *self.more)


class Load:
    """A constant number of requests at a time, whose prompts can be exchanged."""

    def __init__(self, url: str, clients: int, tokens: int) -> None:
        self._url, self._clients, self._tokens = url, clients, tokens
        self._lock = threading.Lock()
        self._source: Iterator[list[int]] = iter(())
        self._captured = False
        self._is_over = threading.Event()
        self.requests = self.failed = 0

    def send(self, prompts: Sequence[list[int]], *, captured: bool) -> None:
        """From now on these prompts, from the first one on; after the last one again the first."""
        with self._lock:
            self._source, self._captured = cycle(prompts), captured

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send requests for as long as the block lasts, then wait for the last answers."""
        clients = [threading.Thread(target=self._ask_on) for _ in range(self._clients)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            self._is_over.set()
            for client in clients:
                client.join()

    def _ask_on(self) -> None:
        while not self._is_over.is_set():
            with self._lock:
                prompt, captured = next(self._source), self._captured
            answer = ask(self._url, prompt, captured, self._tokens)
            with self._lock:
                self.requests += 1
                self.failed += answer is None


@contextmanager
def sampled(url: str) -> Iterator[list[Sample]]:
    """The server's counters, once a second for as long as the block lasts."""
    samples: list[Sample] = []
    is_over = threading.Event()

    def read_on() -> None:
        while not is_over.wait(SAMPLE_SECONDS):
            samples.append(read_counters(url))

    samples.append(read_counters(url))
    reader = threading.Thread(target=read_on)
    reader.start()
    try:
        yield samples
    finally:
        is_over.set()
        reader.join()


def read_counters(url: str) -> Sample:
    """Output tokens, steps with drafts and accepted drafts, and when they were read."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    second = time.monotonic()
    tokens, steps, accepted = (
        sum(map(float, re.findall(rf"^{name}\{{.*\}} (\S+)", text, re.MULTILINE)))
        for name in (TOKENS, *COUNTERS)
    )
    return {"second": second, "tokens": tokens, "steps": steps, "accepted": accepted}


def _wait_for_swap(url: str, learner: Learner) -> float:
    """When the server had another version than the first one."""
    ended: float | None = None
    while served_drafter(url)["version"] == FIRST:
        now = time.monotonic()
        if ended is None and learner.process.poll() is not None:
            ended = now
            require_promoted(learner.result())
        if ended is not None and now - ended > SWAP_SECONDS:
            sys.exit("the server has not swapped after the learner's end")
        time.sleep(0.2)
    return time.monotonic()


def summary(found: dict[str, Any], *, kind: str, clients: int) -> dict[str, Any]:
    """Speeds of the phases with intervals, their ratio, and the speed in every slice."""
    samples = found["samples"]
    edges = {
        "before": (SETTLE_SECONDS, found["learner_started"]),
        "learning": (found["learner_started"], found["swapped"]),
        "after": (found["learner_ended"] + SETTLE_SECONDS, found["seconds"]),
    }
    slices = {phase: slices_of(samples, *span) for phase, span in edges.items()}
    before, after = (np.array([each["speed"] for each in slices[p]]) for p in ("before", "after"))
    count = min(len(before), len(after))
    if count < 1:
        raise ValueError(
            f"a phase has no whole slice of {SLICE_SECONDS:g} s; expected at least one before and "
            "one after: raise --seconds"
        )
    ratio = bootstrap(
        count, lambda draw: after[:count][draw].mean(-1) / before[:count][draw].mean(-1)
    )
    rest = {name: value for name, value in found.items() if name != "samples"}
    return {
        "kind": kind,
        "clients": clients,
        "slice_seconds": SLICE_SECONDS,
        **rest,
        "tokens_per_second": {p: _mean(each).model_dump() for p, each in slices.items()},
        "slices_in_phase": {p: len(each) for p, each in slices.items()},
        "ratio": ratio.model_dump(),
        "acceptance_length": {p: _length(samples, *edges[p]) for p in ("before", "after")},
        "slices": slices_of(samples, 0.0, found["seconds"]),
        "samples": [{name: round(value, 2) for name, value in each.items()} for each in samples],
    }


def slices_of(samples: Sequence[Sample], start: float, end: float) -> list[dict[str, float]]:
    """The speed in each whole slice of a span, with the middle of the slice."""
    seconds = np.array([each["second"] for each in samples])
    tokens = np.array([each["tokens"] for each in samples])
    edges = np.arange(start, min(end, seconds[-1]) + 1e-9, SLICE_SECONDS)
    counted = np.interp(edges, seconds, tokens)
    return [
        {"second": float(at + SLICE_SECONDS / 2), "speed": float(more / SLICE_SECONDS)}
        for at, more in zip(edges, np.diff(counted), strict=False)
    ]


def _mean(slices: Sequence[dict[str, float]]) -> Interval:
    speeds = np.array([each["speed"] for each in slices] or [float("nan")])
    return bootstrap(len(speeds), lambda draw: speeds[draw].mean(-1))


def _length(samples: Sequence[Sample], start: float, end: float) -> float:
    """The acceptance length over a span."""
    inside = [each for each in samples if start <= each["second"] <= end]
    steps = inside[-1]["steps"] - inside[0]["steps"]
    return 1 + (inside[-1]["accepted"] - inside[0]["accepted"]) / steps


if __name__ == "__main__":
    main()
