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
import re
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

import result_charts
from common import ROOT, SHIPPED, provenance
from leadout.data.chat import Chat
from leadout.data.prompts import read_prompts
from leadout.engine.server import Server
from leadout.registry import Registry
from leadout.stats import Interval, bootstrap

OUT = ROOT / "results" / "learn"
NEW, PLAIN = "tickets", "shift"
BASE = ("gsm8k", "humaneval", "mt_bench")
MEASURED = {NEW: 80, PLAIN: 40, **dict.fromkeys(BASE, 40)}  # prompts
BATCH = 10  # prompts that are measured together; batches are the unit of the intervals
CONCURRENCY = 16
TOKENS = 160
FLAGS = (
    *("--max-num-seqs", str(CONCURRENCY), "--max-model-len", "2048", "--enforce-eager"),
    *("--compilation-config", '{"custom_ops": ["all"]}', "--served-model-name", "smollm2"),
)
TICKET = (
    "Write a support ticket in XML with the elements <ticket>, <title>, <description>, <priority> "
    "and <status> for this request: "
)
_TOOL = re.compile(r"\w+\(.*\)")  # the last line of a tool's description
COUNTERS = (
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_accepted_tokens_total",
)
KEY = secrets.token_hex(16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "prompts", "data", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--requests", type=int, default=1500)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, default=30.0)
    budget.add_argument("--tokens", type=int, help="to train on, instead of minutes")
    arguments, more = parser.parse_known_args()  # other flags go to `leadout learn`
    arguments.work.mkdir(parents=True, exist_ok=True)
    loop = Loop(arguments, more)
    loop.start_registry()
    with loop.server("learning", "--registry", loop.registry, "--capture", loop.capture) as url:
        before = loop.stage("before", lambda: loop.measure(url, MEASURED))
        traffic = loop.stage("traffic", lambda: loop.send_traffic(url))
        learnt = loop.stage("learnt", loop.learn)
        if not learnt["promoted"]:
            sys.exit("rejected: " + "; ".join(learnt["decision"]["reasons"]))
        swapped = loop.stage("swapped", lambda: loop.wait_for(url, learnt["version"]))
        after = loop.stage("after", lambda: loop.measure(url, {NEW: MEASURED[NEW]}))
    version = loop.registry / "versions" / f"{learnt['version']:04d}"
    with loop.server("after", "--draft", version) as url:
        rest = {name: count for name, count in MEASURED.items() if name != NEW}
        after |= loop.stage("after-base", lambda: loop.measure(url, rest))
    write_result(loop, before, after, traffic, learnt, swapped)


class Loop:
    """The folder of the run, and its stages."""

    def __init__(self, arguments: Any, more: Sequence[str]) -> None:
        self.target: Path = arguments.target
        self.prompts: Path = arguments.prompts
        self.data: Path = arguments.data
        self.work: Path = arguments.work
        self.requests: int = arguments.requests
        self.budget = (
            ("--minutes", arguments.minutes)
            if arguments.tokens is None
            else ("--tokens", arguments.tokens)
        )
        self.more = more
        self.registry = self.work / "registry"
        self.capture = self.work / "capture"
        self._chat = Chat(self.target)

    def stage(self, name: str, run: Callable[[], Any]) -> Any:
        """The result of a stage, which runs only once."""
        path = self.work / f"{name}.json"
        if not path.exists():
            print(f"{time.strftime('%H:%M')} {name}", flush=True)
            found = run()
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(found, indent=2) + "\n")
            partial.rename(path)
        return json.loads(path.read_text())

    def start_registry(self) -> None:
        if not (self.registry / "serving.json").exists():
            self._leadout("learn", self.target, "--registry", self.registry, "--start", SHIPPED)

    @contextmanager
    def server(self, name: str, *words: object) -> Iterator[str]:
        serve = [sys.executable, "-m", "leadout", "serve", self.target, *words, *FLAGS]
        log = self.work / f"server-{name}.log"
        with Server([str(word) for word in serve], log=log, environment=_ADMIN) as running:
            yield running.url

    def measure(self, url: str, sets: dict[str, int]) -> dict[str, Any]:
        """Greedy acceptance by vLLM's counters, in batches; none of it is captured."""
        found = {}
        for name, count in sets.items():
            prompts = self._measured_prompts(name, count)
            batches, answers = [], []
            for start in track(range(0, len(prompts), BATCH), description=name):
                earlier = counters(url)
                answers += ask_all(url, prompts[start : start + BATCH], captured=False)
                steps, accepted = (
                    now - then for now, then in zip(counters(url), earlier, strict=True)
                )
                batches.append({"steps": steps, "accepted": accepted})
            failed = answers.count(None)
            found[name] = {"prompts": len(prompts), "failed": failed, "batches": batches}
        return found

    def send_traffic(self, url: str) -> dict[str, Any]:
        """Send the new traffic, all of which is captured."""
        asked = dict.fromkeys(ticket(prompt.text) for prompt in self._read("shift_train"))
        # Without the tool descriptions, a few of them are in the measured set.
        unseen = {ticket(prompt.text) for prompt in self._read(PLAIN)} | {TICKET}
        texts = [text for text in asked if text not in unseen]
        prompts = [self._chat.prompt([text]) for text in texts[: self.requests]]
        began = time.monotonic()
        failed = ask_all(url, prompts, captured=True).count(None)
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

    def wait_for(self, url: str, version: int) -> Any:
        """Wait for the server, which swaps some seconds after the pointer has changed."""
        request = urllib.request.Request(
            f"{url}/leadout/drafter", headers={"Authorization": f"Bearer {KEY}"}
        )
        for _ in range(120):
            with urllib.request.urlopen(request, timeout=60) as response:
                found = json.load(response)
            if found["version"] == version:
                return found
            time.sleep(1)
        sys.exit(f"the server still has version {found['version']}, expected {version}")

    def _measured_prompts(self, name: str, count: int) -> list[list[int]]:
        """Evenly spaced prompts of a set, as some sets are ordered by kind."""
        prompts = self._read(PLAIN if name == NEW else name)
        chosen = [prompts[len(prompts) * i // count] for i in range(min(count, len(prompts)))]
        texts = [prompt.text for prompt in chosen]
        return [self._chat.prompt([ticket(text) if name == NEW else text]) for text in texts]

    def _read(self, name: str) -> Sequence[Any]:
        return read_prompts([str(self.prompts / f"{name}.jsonl")])

    def _leadout(self, *words: object) -> None:
        subprocess.run([sys.executable, "-m", "leadout", *map(str, words)], check=True)


_ADMIN = {"LEADOUT_ADMIN_KEY": KEY}


def ticket(prompt: str) -> str:
    """The request below the descriptions of tools, as a ticket."""
    rows = prompt.split("\n")
    tools = [place for place, row in enumerate(rows) if _TOOL.fullmatch(row)]
    return TICKET + " ".join(rows[tools[-1] + 1 :] if tools else rows)


def ask_all(url: str, prompts: Sequence[list[int]], *, captured: bool) -> list[str | None]:
    """Answers in the order of the prompts; None where the request failed."""

    def ask(prompt: list[int]) -> str | None:
        body = {
            "model": "smollm2",
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0.0,
            "vllm_xargs": {"leadout_capture": "on" if captured else "off"},
        }
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                text: str = json.load(response)["choices"][0]["text"]
                return text
        except OSError as problem:
            print(f"failed: {problem}", flush=True)
            return None

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(ask, prompts))


def counters(url: str) -> list[float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        rows = response.read().decode().splitlines()
    return [
        sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith(f"{name}{{"))
        for name in COUNTERS
    ]


def length_of(measured: dict[str, Any]) -> Interval:
    """Acceptance length with a confidence interval over batches."""
    steps, accepted = _columns(measured)
    return bootstrap(len(steps), lambda draw: 1 + accepted[draw].sum(-1) / steps[draw].sum(-1))


def change_of(before: dict[str, Any], after: dict[str, Any]) -> Interval:
    """The relative change; the same prompts are in the same batches."""
    (old_steps, old), (new_steps, new) = _columns(before), _columns(after)

    def change(draw: torch.Tensor) -> torch.Tensor:
        was = 1 + old[draw].sum(-1) / old_steps[draw].sum(-1)
        return (1 + new[draw].sum(-1) / new_steps[draw].sum(-1)) / was - 1

    return bootstrap(len(old), change)


def _columns(measured: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    batches = measured["batches"]
    steps = torch.tensor([each["steps"] for each in batches], dtype=torch.float64)
    return steps, torch.tensor([each["accepted"] for each in batches], dtype=torch.float64)


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
    events = [entry.model_dump(exclude={"evidence"}) for entry in Registry(loop.registry).ledger()]
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
