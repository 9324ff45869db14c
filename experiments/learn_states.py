"""Learning from served states against learning from captured files: acceptance, time, memory.

    python experiments/learn_states.py TARGET PROMPTS_FOLDER WORK_FOLDER

For two kinds of traffic that the shipped drafter has never seen, and for three seeds, a server of
SmolLM2 answers the same requests, greedily. It captures them to files and puts all of their states
into a ring (`--learn-rate 1`). Two learners then make a version each, with the same settings and
the same number of answer tokens; each has a registry of its own, whose cycles have the numbers 1,
2, 3: a cycle's number is its seed, for the replayed data and for the order of training.

- ring: the learner waits for requests before the first one is sent, and begins as soon as it has
  as many as it requires. `seconds_to_swap` is the time from the first request until the server
  says that it has the new version. Learner and server share two cores meanwhile.
- files: the learner starts when all requests are answered, as from a timer, and alone on the
  machine. `seconds_to_swap` is the sum of the time for the same requests, from its start to its
  end, and until a server has the new version. The requests are not sent again for it.

The ring's learner requires a few requests less than are sent (`--unused-share`), since answers
shorter than a block are not used: files have that much more text at most. Both learners are one
process with two threads. The states of replayed data are made once for the ring, before any request
(`replay_states_seconds`); from files, the learner computes those that it needs in every cycle. The
ring's learner does not run the target's own answers with and without the candidate, which is a part
of the time from files. Prefix caching is off, so that the ring has the beginning of every request.
The bound of the gate on the base is wider than by default, because the base has few sequences.

Acceptance is that of held-out requests of the same kind as served, by vLLM's counters. Memory is
the largest resident memory of the learner alone, and with the processes that it starts (engines
that compare answers, and the process that makes states of replayed data if they are missing).

Without --data, 400 answers to prompts of the training sets are generated first. Takes about an hour
on two idle cores; a second call continues after the last complete stage. The throughput ratios come
from results/learn/states_cost.json (learn_states_cost.py), if it exists.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import ROOT, SHIPPED, write_result
from leadout.registry import FIRST
from learn_loop import (
    KINDS,
    Learner,
    LearnRun,
    ask_all,
    change_of,
    length_of,
    measure,
    require_promoted,
    serve_version,
    served,
    served_drafter,
    start_registry,
    wait_for,
)

OUT = ROOT / "results" / "learn" / "states.json"
COST = ROOT / "results" / "learn" / "states_cost.json"
BATCH = 6  # measured prompts; batches are the unit of the intervals
POLL_SECONDS = 0.2
SWAP_SECONDS = 60.0  # after the learner's end
IDLE_SECONDS = 90.0  # of a learner that still waits when all requests are answered
WAITING = "waiting for requests"  # the stage of a learner that reads the ring
ARMS = ("files", "ring")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "prompts", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--data", type=Path, help="of `leadout data`; default: made here")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["tickets", "json"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200, help="sent, for each kind and seed")
    parser.add_argument("--unused-share", type=float, default=0.04, help="too short to learn from")
    parser.add_argument("--measured", type=int, default=60, help="held-out prompts of each kind")
    parser.add_argument("--tokens", type=int, default=60_000, help="to train on, with repetitions")
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--answers", type=int, default=400, help="of the data, if it is made here")
    parser.add_argument("--base-loss", type=float, default=0.1)
    parser.add_argument("--ring", type=Path, default=Path("/dev/shm/leadout-learn-states"))
    parser.add_argument("--out", type=Path, default=OUT)
    arguments, more = parser.parse_known_args()  # other flags go to `leadout learn`
    experiment = Experiment(arguments, more)
    experiment.make_data()
    try:
        found = {kind: experiment.learn_kind(kind) for kind in arguments.kinds}
    finally:
        shutil.rmtree(arguments.ring, ignore_errors=True)
    result = summary(found, experiment)
    if COST.exists():
        result["throughput_ratio"] = json.loads(COST.read_text())["throughput_ratio"]
    write_result(arguments.out, result, target=arguments.target, drafter=SHIPPED)


class Experiment(LearnRun):
    """Both learners on the same requests, by kind and seed."""

    def __init__(self, arguments: Any, more: Sequence[str]) -> None:
        super().__init__(arguments, more)
        # To train on, and as many held out.
        self.required = int(arguments.requests * (1 - arguments.unused_share)) // 2

    def learn_kind(self, kind: str) -> dict[str, Any]:
        """The results of both learners, by seed, and the acceptance before."""
        registries = {arm: self.work / f"registry-{arm}-{kind}" for arm in ARMS}
        for registry in registries.values():
            start_registry(self.target, registry)
        names = [f"{kind}-{arm}-{seed}" for arm in ARMS for seed in range(self.arguments.seeds)]
        if all(map(self.stage.is_done, names)):
            return self._stored(kind)
        log = self.work / f"server-files-{kind}.log"
        follow = ("--registry", registries["files"], "--no-enable-prefix-caching")
        with served(self.target, log, *follow) as server:
            serve_version(server.url, registries["files"], FIRST, "the start")
            self.stage(f"{kind}-before", lambda: self._measure(server.url, kind))
            for seed in range(self.arguments.seeds):
                ring = partial(self._from_ring, kind, seed, registries["ring"])
                self.stage(f"{kind}-ring-{seed}", ring)
                files = partial(self._from_files, kind, seed, server.url, registries["files"])
                self.stage(f"{kind}-files-{seed}", files)
        return self._stored(kind)

    def _stored(self, kind: str) -> dict[str, Any]:
        def no_more() -> None:
            raise RuntimeError("every stage is complete")

        seeds = range(self.arguments.seeds)
        found = {arm: [self.stage(f"{kind}-{arm}-{s}", no_more) for s in seeds] for arm in ARMS}
        return {"before": self.stage(f"{kind}-before", no_more), **found}

    def _from_ring(self, kind: str, seed: int, registry: Path) -> dict[str, Any]:
        ring = self.arguments.ring
        shutil.rmtree(ring, ignore_errors=True)  # states of an earlier seed would be learnt from
        words = ("--registry", registry, "--capture", self._capture(kind, seed))
        words += ("--learn-states", ring, "--learn-rate", 1, "--no-enable-prefix-caching")
        shutil.rmtree(self._capture(kind, seed), ignore_errors=True)
        with served(self.target, self.work / f"server-ring-{kind}-{seed}.log", *words) as server:
            serve_version(server.url, registry, FIRST, "the next seed")
            source = ("--states", ring, "--work", self.work / "cycle-ring")
            made = self.stage("replay-states", lambda: self._make_replay_states(registry, source))
            learner = self._learner(f"ring-{kind}-{seed}", registry, *source, "--cycles", 1)
            prompts = self.prompts.sent(kind, self.arguments.requests)
            traffic: dict[str, Any] = {}
            try:
                learner.wait_until_it_says(WAITING)
                began = time.monotonic()
                sender = threading.Thread(
                    target=lambda: traffic.update(self._send(server.url, prompts))
                )
                sender.start()
                swapped = _wait_for_swap(server.url, learner, sender)
                sender.join()
                learnt = learner.result()
            finally:
                learner.stop()
            return {
                "seconds_to_swap": swapped - began,
                "serving_seconds": traffic["seconds"],
                "failed_requests": traffic["failed"],
                "replay_states_seconds": made["seconds"],
                **self._outcome(server.url, kind, learner, learnt),
            }

    def _from_files(self, kind: str, seed: int, url: str, registry: Path) -> dict[str, Any]:
        traffic = self.stage(f"{kind}-ring-{seed}", lambda: None)
        serve_version(url, registry, FIRST, "the next seed")
        work = self.work / "cycle-files"
        shutil.rmtree(work, ignore_errors=True)  # a cycle that continued would take less time
        source = ("--traffic", self._capture(kind, seed), "--work", work)
        learner = self._learner(f"files-{kind}-{seed}", registry, *source)
        try:
            learnt = learner.result()
        finally:
            learner.stop()
        ended = time.monotonic()
        require_promoted(learnt)
        wait_for(url, learnt["version"], every=POLL_SECONDS)
        swapped = time.monotonic()
        return {
            "seconds_to_swap": traffic["serving_seconds"] + swapped - learner.began,
            "serving_seconds": traffic["serving_seconds"],
            "learning_seconds": ended - learner.began,
            "failed_requests": 0,
            **self._outcome(url, kind, learner, learnt),
        }

    def _outcome(self, url: str, kind: str, learner: Learner, learnt: Any) -> dict[str, Any]:
        measured = self._measure(url, kind)
        version = served_drafter(url)["version"]
        if version != learnt["version"]:
            sys.exit(f"version {learnt['version']} was rolled back to {version} while measured")
        adapted = learnt["adaptation"]
        return {
            "measured": measured,
            "cycle_number": adapted["training"]["seed"],
            "training_seconds": 60 * adapted["minutes"],
            "cycle_seconds": learnt["seconds"],
            "steps": adapted["steps"],
            "traffic_requests": adapted["traffic_requests"],
            "replay_sequences": adapted["replay_sequences"],
            "memory_bytes": learner.memory,
            "served": learnt.get("served"),  # what became of the sequences in the ring
            "gate": {
                part: learnt["evidence"][part]["change"]
                for part in ("traffic", "base")
                if learnt["evidence"][part] is not None
            },
        }

    def _make_replay_states(self, registry: Path, source: tuple[object, ...]) -> dict[str, float]:
        learner = self._learner("replay-states", registry, *source, "--cycles", 0)
        if learner.process.wait() != 0:
            sys.exit(f"the states of replayed data were not made:\n{learner.log.read_text()}")
        return {"seconds": time.monotonic() - learner.began}

    def _learner(self, name: str, registry: Path, *source: object) -> Learner:
        settings = self.arguments
        words = [self.target, "--registry", registry, *source, "--replay", self.data]
        words += ["--tokens", settings.tokens, "--min-requests", self.required]
        words += ["--base-loss", settings.base_loss, *self.more]
        return Learner(self.work / f"learn-{name}.log", *words)

    def _send(self, url: str, prompts: Sequence[list[int]]) -> dict[str, Any]:
        began = time.monotonic()
        answers = ask_all(url, prompts, captured=True, tokens=self.arguments.answer_tokens)
        return {"failed": answers.count(None), "seconds": time.monotonic() - began}

    def _measure(self, url: str, kind: str) -> dict[str, Any]:
        prompts = self.prompts.measured(kind, self.arguments.measured)
        tokens = self.arguments.answer_tokens
        return measure(url, prompts, tokens=tokens, batch=BATCH, name=kind)

    def _capture(self, kind: str, seed: int) -> Path:
        return self.work / f"capture-{kind}-{seed}"


def _wait_for_swap(url: str, learner: Learner, sender: threading.Thread) -> float:
    """When the server had another version than the first one."""
    sent: float | None = None
    ended: float | None = None
    while served_drafter(url)["version"] == FIRST:
        now = time.monotonic()
        if sent is None and not sender.is_alive():
            sent = now
        if sent is not None and now - sent > IDLE_SECONDS and WAITING in learner.last_line():
            sys.exit("too few answers are long enough to learn from: raise --unused-share")
        if ended is None and learner.process.poll() is not None:
            ended = now
            require_promoted(learner.result())
        if ended is not None and now - ended > SWAP_SECONDS:
            sys.exit("the server has not swapped after the learner's end")
        time.sleep(POLL_SECONDS)
    return time.monotonic()


def summary(found: dict[str, Any], experiment: Experiment) -> dict[str, Any]:
    """By learner and kind the rows of all seeds, and both learners compared."""
    result: dict[str, Any] = {
        "requests": experiment.arguments.requests,
        "measured_prompts": experiment.arguments.measured,
        "tokens_trained_on": experiment.arguments.tokens,
        "base_loss": experiment.arguments.base_loss,
    }
    for arm in ARMS:
        result[arm] = {
            kind: [_row(seed, each["before"], one) for seed, one in enumerate(each[arm])]
            for kind, each in found.items()
        }
    result["compared"] = {kind: _compared(each) for kind, each in found.items()}
    measured = [
        one for each in found.values() for one in [*each["files"], *each["ring"], each["before"]]
    ]
    result["failed_requests"] = sum(
        one.get("failed_requests", 0) + one.get("measured", one)["failed"] for one in measured
    )
    return result


def _row(seed: int, before: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in one.items() if name != "measured"}
    return {
        "seed": seed,
        "acceptance_before": length_of(before).model_dump(),
        "acceptance_after": length_of(one["measured"]).model_dump(),
        "change": change_of(before, one["measured"]).model_dump(),
        **rest,
    }


def _compared(each: dict[str, Any]) -> dict[str, Any]:
    """The ring relative to files: acceptance over all seeds, and the share of time and memory."""
    pooled = {
        arm: {"batches": [b for one in each[arm] for b in one["measured"]["batches"]]}
        for arm in ARMS
    }
    pairs = list(zip(each["ring"], each["files"], strict=True))

    def shares(value: Any) -> dict[str, float]:
        found = [value(ring) / value(files) for ring, files in pairs]
        return {"median": statistics.median(found), "low": min(found), "high": max(found)}

    return {
        "acceptance_change": change_of(pooled["files"], pooled["ring"]).model_dump(),
        "share_of_time_to_swap": shares(lambda one: one["seconds_to_swap"]),
        "share_of_cycle_time": shares(lambda one: one["cycle_seconds"]),
        "share_of_memory": shares(lambda one: one["memory_bytes"]["learner"]),
    }


if __name__ == "__main__":
    main()
