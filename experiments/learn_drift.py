"""Eight hours of drifting traffic in forty minutes, with and without a learner on served states.

    python experiments/learn_drift.py TARGET PROMPTS_FOLDER WORK_FOLDER

Kinds of text come and go (`PHASES`), none of which the shipped drafter has seen, beside a quarter
of plain requests as it was trained on. The same requests in the same order are sent to two servers
of SmolLM2, greedily: one keeps the shipped drafter, the other one follows a registry and puts the
states of all requests into a ring, from which `leadout learn --states` learns for as long as the
run lasts, on the same two cores. Requests to the second server have a schedule by the clock, which
leaves time for the learner; the first server answers its requests afterwards, as fast as it can,
because its acceptance does not depend on time. Acceptance is counted by vLLM in slices of the run;
a slice ends when all of its requests are answered.

The base sets are measured with the shipped drafter, and with the version that is served at the end.
Prefix caching is off, so that the ring has the beginning of every request. The states of replayed
data are made before the clock starts. An hour and a half on two idle cores with the 40 minutes;
for a shorter run: `--minutes 10 --slice-seconds 60`. A second call continues after the last
complete stage; the run with the learner is one stage.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import result_charts
from common import ROOT, SHIPPED, write_result
from leadout.registry import Registry
from learn_loop import (
    BASE,
    CONCURRENCY,
    TRAINING_SETS,
    Learner,
    LearnRun,
    ask,
    ask_all,
    change_of,
    counted,
    events_of,
    length_of,
    measure,
    served,
    served_drafter,
    start_registry,
)

OUT = ROOT / "results" / "learn" / "drift.json"
PLAIN = "plain"
PLAIN_SHARE = 0.25
# Shares of the other requests, for equally long parts of the run.
PHASES: tuple[dict[str, float], ...] = (
    {"tickets": 1.0},
    {"tickets": 0.5, "json": 0.5},
    {"json": 1.0},
    {"json": 0.3, "emails": 0.7},
    {"emails": 0.5, "tickets": 0.5},
)
WAITING = "waiting for requests"  # the stage of a learner that reads the ring
BUSY_SHARE = 0.8  # of a slice, over which its requests are spread
COUNTED_EVENTS = ("promoted", "rejected", "undecided", "swapped", "rolled_back", "refused")

Slice = list[tuple[str, list[int]]]  # kind and prompt of each request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "prompts", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--data", type=Path, help="of `leadout data`; default: made here")
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--hours", type=float, default=8.0, help="that the minutes stand for")
    parser.add_argument("--slice-seconds", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=0.5, help="requests per second")
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=40_000, help="to train on in each cycle")
    parser.add_argument("--min-requests", type=int, default=50)
    parser.add_argument("--keep-gib", type=float, default=0.5, help="memory for served sequences")
    parser.add_argument("--base-loss", type=float, default=0.03, help="bound of the gate")
    parser.add_argument("--base-prompts", type=int, default=40, help="measured, of each base set")
    parser.add_argument("--answers", type=int, default=600, help="of the data, if it is made here")
    parser.add_argument("--ring", type=Path, default=Path("/dev/shm/leadout-learn-drift"))
    parser.add_argument("--out", type=Path, default=OUT)
    arguments, more = parser.parse_known_args()  # other flags go to `leadout learn`
    drift = Drift(arguments, more)
    drift.make_data()
    slices = drift.slices()
    try:
        learning = drift.stage("with", lambda: drift.run_with(slices))
    finally:
        shutil.rmtree(arguments.ring, ignore_errors=True)
    without = drift.stage("without", lambda: drift.run_without(slices))
    after = drift.stage("base-after", lambda: drift.measure_last(learning["version"]))
    result = summary(drift, slices, without, learning, after)
    write_result(arguments.out, result, target=arguments.target, drafter=SHIPPED)
    arguments.out.with_suffix(".svg").write_text(result_charts.drift(result))


class Drift(LearnRun):
    """The two runs over the same requests."""

    def __init__(self, arguments: Any, more: Sequence[str]) -> None:
        super().__init__(arguments, more)
        self.registry = self.work / "registry"

    def slices(self) -> list[Slice]:
        """The requests of the run, the same in every call; none is sent twice."""
        settings = self.arguments
        count = round(60 * settings.minutes / settings.slice_seconds)
        each = round(settings.rate * settings.slice_seconds)
        draw = random.Random(0)
        queues: dict[str, Iterator[list[int]]] = {PLAIN: iter(self._plain(count * each))}
        for kind in {kind for phase in PHASES for kind in phase}:
            queues[kind] = iter(self.prompts.sent(kind, count * each))
        found: list[Slice] = []
        for number in range(count):
            phase = PHASES[number * len(PHASES) // count]
            kinds = draw.choices(list(phase), list(phase.values()), k=each)
            kinds = [PLAIN if draw.random() < PLAIN_SHARE else kind for kind in kinds]
            found.append([(kind, next(queues[kind])) for kind in kinds])
        return found

    def _plain(self, count: int) -> list[list[int]]:
        """Prompts of the training sets, one set after the other in turn."""
        sets = [self.prompts.plain(name, count) for name in TRAINING_SETS]
        return [prompt for row in zip(*sets, strict=False) for prompt in row][:count]

    def run_without(self, slices: Sequence[Slice]) -> dict[str, Any]:
        log = self.work / "server-without.log"
        words = ("--draft", SHIPPED, "--no-enable-prefix-caching")
        tokens, rows = self.arguments.answer_tokens, []
        with served(self.target, log, *words) as server:
            base = self._measure_base(server.url)
            for some in slices:
                with counted(server.url) as found:
                    prompts = [prompt for _, prompt in some]
                    answers = ask_all(server.url, prompts, captured=True, tokens=tokens)
                rows.append({**found, "failed": answers.count(None)})
        return {"slices": rows, "base": base}

    def run_with(self, slices: Sequence[Slice]) -> dict[str, Any]:
        shutil.rmtree(self.registry, ignore_errors=True)  # of a run that was interrupted
        shutil.rmtree(self.arguments.ring, ignore_errors=True)
        start_registry(self.target, self.registry)
        words = ("--registry", self.registry, "--learn-states", self.arguments.ring)
        words += ("--learn-rate", 1, "--no-enable-prefix-caching")
        rows = []
        with served(self.target, self.work / "server-with.log", *words) as server:
            made = self._learner("replay-states", "--cycles", 0)
            if made.process.wait() != 0:
                sys.exit(f"the states of replayed data were not made:\n{made.log.read_text()}")
            learner = self._learner("learner")
            try:
                learner.wait_until_it_says(WAITING)
                started, began = datetime.now(UTC), time.monotonic()
                for number, some in enumerate(slices):
                    at = began + number * self.arguments.slice_seconds
                    rows.append({**self._send_slice(server.url, some, at), "slice": number})
                    ended_early = learner.process.poll() is not None
                    if ended_early:
                        sys.exit(f"the learner has ended:\n{learner.log.read_text()[-3000:]}")
                seconds = time.monotonic() - began
            finally:
                learner.stop()
            version = served_drafter(server.url)["version"]
        return {
            "started": started.isoformat(),
            "seconds": seconds,
            "slices": rows,
            "version": version,
            "events": events_of(self.registry),
            "cycles": [
                {
                    "verdict": each["decision"]["verdict"],
                    "reasons": each["decision"]["reasons"],
                    "version": each["version"],
                    "seconds": each["seconds"],
                    "traffic_requests": each["adaptation"]["traffic_requests"],
                }
                for each in learner.results()
            ],
            "memory_bytes": learner.memory,
        }

    def _learner(self, name: str, *words: object) -> Learner:
        settings = self.arguments
        command = [self.target, "--states", settings.ring, "--registry", self.registry]
        command += ["--replay", self.data, "--work", self.work / "cycle"]
        command += ["--tokens", settings.tokens, "--min-requests", settings.min_requests]
        command += ["--keep-gib", settings.keep_gib, "--base-loss", settings.base_loss]
        return Learner(self.work / f"{name}.log", *command, *words, *self.more)

    def _send_slice(self, url: str, some: Slice, at: float) -> dict[str, Any]:
        """Send the requests of a slice from the time `at` on, evenly spread over most of it."""
        _sleep_until(at)
        version, began = served_drafter(url)["version"], time.monotonic()
        step = BUSY_SHARE * self.arguments.slice_seconds / len(some)
        with counted(url) as found, ThreadPoolExecutor(CONCURRENCY) as pool:
            asked = []
            for place, (_, prompt) in enumerate(some):
                _sleep_until(at + place * step)
                asked.append(pool.submit(ask, url, prompt, True, self.arguments.answer_tokens))
            failed = [each.result() for each in asked].count(None)
        seconds = time.monotonic() - began
        return {**found, "failed": failed, "version_at_start": version, "seconds": seconds}

    def measure_last(self, version: int) -> Any:
        folder = Registry(self.registry).path(version)
        log = self.work / "server-base-after.log"
        words = ("--draft", folder, "--no-enable-prefix-caching")
        with served(self.target, log, *words) as server:
            return self._measure_base(server.url)

    def _measure_base(self, url: str) -> dict[str, Any]:
        count, tokens = self.arguments.base_prompts, self.arguments.answer_tokens
        return {
            name: measure(url, self.prompts.plain(name, count), tokens=tokens, name=name)
            for name in BASE
        }


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


def summary(
    drift: Drift, slices: Sequence[Slice], without: Any, learning: Any, after: Any
) -> dict[str, Any]:
    settings = drift.arguments
    hours_each = settings.hours / len(slices)
    rows = [
        {
            "hour": hours_each * (number + 0.5),
            "requests": dict(Counter(kind for kind, _ in some)),
            "without": 1 + before["accepted"] / before["steps"],
            "with": 1 + now["accepted"] / now["steps"],
            "version_at_start": now["version_at_start"],
        }
        for number, (some, before, now) in enumerate(
            zip(slices, without["slices"], learning["slices"], strict=True)
        )
    ]
    started = datetime.fromisoformat(learning["started"])
    events = [
        {
            "hour": (datetime.fromisoformat(each["when"]) - started).total_seconds()
            / (60 * settings.minutes)
            * settings.hours,
            "event": each["event"],
            "version": each["version"],
        }
        for each in learning["events"]
        if each["event"] in COUNTED_EVENTS
    ]
    numbers = Counter(each["event"] for each in events)
    base = {
        name: {
            "before": length_of(before).model_dump(),
            "after": length_of(after[name]).model_dump(),
            "change": change_of(before, after[name]).model_dump(),
        }
        for name, before in without["base"].items()
    }
    all_base = [
        {"batches": [batch for each in sets.values() for batch in each["batches"]]}
        for sets in (without["base"], after)
    ]
    batches = {"with": {"batches": learning["slices"]}, "without": {"batches": without["slices"]}}
    measured = [*without["base"].values(), *after.values()]
    failed = sum(each["failed"] for each in [*learning["slices"], *without["slices"], *measured])
    return {
        "minutes": learning["seconds"] / 60,
        "stands_for_hours": settings.hours,
        "requests": sum(map(len, slices)),
        "failed_requests": failed,
        "swaps": numbers["swapped"],
        "roll_backs": numbers["rolled_back"],
        "cycles": {name: numbers[name] for name in ("promoted", "rejected", "undecided")},
        "acceptance": {name: length_of(each).model_dump() for name, each in batches.items()},
        "change": change_of(batches["without"], batches["with"]).model_dump(),
        "base_loss_bound": settings.base_loss,
        "base_change": change_of(*all_base).model_dump(),
        "base": base,
        "last_version": learning["version"],
        "memory_bytes": learning["memory_bytes"],
        "slices": rows,
        "events": events,
        "learnt": learning["cycles"],
    }


if __name__ == "__main__":
    main()
