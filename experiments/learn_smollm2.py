"""The whole loop on SmolLM2: new traffic, one cycle of `leadout learn`, a swap in a running server.

    python experiments/learn_smollm2.py TARGET PROMPTS_FOLDER DATA_FOLDER WORK_FOLDER

A server follows a registry that starts with the shipped drafter, and captures its traffic. The new
traffic is of a service that writes tickets in XML for the requests of the prompt set `shift_train`;
it is measured on those of `shift`, none of which is captured. All requests are greedy. DATA_FOLDER
is what the shipped drafter was trained on. Takes about an hour and a half on two idle cores; a
second call continues after the last complete stage.

After the swap, the base sets are measured on a second server with the same version: on the first
one they would count as traffic with less acceptance than expected, which causes a rollback.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import result_charts
from common import ROOT, SHIPPED, provenance
from learn_loop import (
    BASE,
    Prompts,
    Stages,
    ask_all,
    change_of,
    events_of,
    length_of,
    measure,
    require_promoted,
    served,
    start_registry,
    wait_for,
)

OUT = ROOT / "results" / "learn"
NEW, PLAIN = "tickets", "shift"
MEASURED = {NEW: 80, PLAIN: 40, **dict.fromkeys(BASE, 40)}  # prompts
TOKENS = 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "prompts", "data", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--requests", type=int, default=1500)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, default=30.0)
    budget.add_argument("--tokens", type=int, help="to train on, instead of minutes")
    arguments, more = parser.parse_known_args()  # other flags go to `leadout learn`
    loop = Loop(arguments, more)
    start_registry(loop.target, loop.registry)
    follow = ("--registry", loop.registry, "--capture", loop.capture)
    with served(loop.target, loop.work / "server-learning.log", *follow) as server:
        url = server.url
        before = loop.stage("before", lambda: loop.measure(url, MEASURED))
        traffic = loop.stage("traffic", lambda: loop.send_traffic(url))
        learnt = loop.stage("learnt", loop.learn)
        require_promoted(learnt)
        swapped = loop.stage("swapped", lambda: wait_for(url, learnt["version"]))
        after = loop.stage("after", lambda: loop.measure(url, {NEW: MEASURED[NEW]}))
    version = loop.registry / "versions" / f"{learnt['version']:04d}"
    with served(loop.target, loop.work / "server-after.log", "--draft", version) as server:
        rest = {name: count for name, count in MEASURED.items() if name != NEW}
        after |= loop.stage("after-base", lambda: loop.measure(server.url, rest))
    write_result(loop, before, after, traffic, learnt, swapped)


class Loop:
    """The folder of the run, and its stages."""

    def __init__(self, arguments: Any, more: Sequence[str]) -> None:
        self.target: Path = arguments.target
        self.data: Path = arguments.data
        self.work: Path = arguments.work
        self.requests: int = arguments.requests
        self.budget = (
            ("--minutes", arguments.minutes)
            if arguments.tokens is None
            else ("--tokens", arguments.tokens)
        )
        self.more = more
        self.stage = Stages(self.work)
        self.registry = self.work / "registry"
        self.capture = self.work / "capture"
        self._prompts = Prompts(arguments.prompts, self.target)

    def measure(self, url: str, sets: dict[str, int]) -> dict[str, Any]:
        found = {}
        for name, count in sets.items():
            chosen = self._prompts.measured if name == NEW else self._prompts.plain
            found[name] = measure(url, chosen(name, count), tokens=TOKENS, name=name)
        return found

    def send_traffic(self, url: str) -> dict[str, Any]:
        """Send the new traffic, all of which is captured."""
        prompts = self._prompts.sent(NEW, self.requests)
        began = time.monotonic()
        failed = ask_all(url, prompts, captured=True, tokens=TOKENS).count(None)
        return {
            "requests": len(prompts),
            "failed": failed,
            "minutes": (time.monotonic() - began) / 60,
        }

    def learn(self) -> Any:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        words = ["learn", self.target, "--registry", self.registry, "--traffic", self.capture]
        words += ["--replay", self.data, *self.budget, "--work", self.work / "cycle"]
        words += self.more
        command = [sys.executable, *torchrun, "-m", "leadout", *map(str, words), "--json"]
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=alone, stdout=subprocess.PIPE, text=True)
        if not ended.stdout:  # a rejected candidate has a result, and exit code 1
            sys.exit("leadout learn failed, see above; a second call continues with it")
        return json.loads(ended.stdout)


def write_result(
    loop: Loop, before: Any, after: Any, traffic: Any, learnt: Any, swapped: Any
) -> None:
    sets = {
        name: {
            "prompts": before[name]["prompts"],
            "before": length_of(before[name]).model_dump(),
            "after": length_of(after[name]).model_dump(),
            "change": change_of(before[name], after[name]).model_dump(),
        }
        for name in MEASURED
    }
    proof = learnt["evidence"]["lossless"]
    # Their messages name folders of this machine.
    learnt["evidence"]["findings"] = [each["name"] for each in learnt["evidence"]["findings"]]
    measured = [*before.values(), *after.values()]
    events = events_of(loop.registry)
    result = {
        "provenance": provenance(target=loop.target, drafter=SHIPPED),
        "acceptance_before": sets[NEW]["before"]["value"],
        "acceptance_after": sets[NEW]["after"]["value"],
        "gain": sets[NEW]["change"]["value"],
        "base_change": min(sets[name]["change"]["value"] for name in BASE),
        "swaps": sum(event["event"] == "swapped" for event in events),
        "failed_requests": traffic["failed"] + sum(each["failed"] for each in measured),
        "changed_answers": proof["texts"] - proof["equal_texts"],
        "compared_answers": proof["texts"],  # greedy, in float32, with and without this version
        "training_minutes": learnt["adaptation"]["minutes"],
        "cycle_minutes": learnt["seconds"] / 60,
        "traffic": traffic,
        "sets": sets,
        "learnt": learnt,
        "served": swapped,
        "ledger": events,
    }
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "smollm2.json").write_text(json.dumps(result, indent=2) + "\n")
    (OUT / "smollm2.svg").write_text(result_charts.learn(result))
    for name, found in sets.items():
        print(
            f"{name:10} {found['before']['value']:.3f} -> {found['after']['value']:.3f} "
            f"({found['change']['value']:+.1%})"
        )


if __name__ == "__main__":
    main()
