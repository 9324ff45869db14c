"""Live control on the real engine: changing traffic, and prompt lookup.

    python experiments/live_smollm2.py TARGET DRAFTER TUNED PROMPTS_DIR WORK_DIR

All servers run throughout and are measured in turn, so that noise of the machine affects them
alike; every ratio is taken within a round. Parts:

- `traffic`: code, then translation, then grade-school mathematics, at concurrency 1 and 8, on bare
  vLLM, two fixed draft lengths, the tuned table and live control;
- `copying`: categories of spec_bench under live control, with and without prompt lookup.

TUNED is a file of `leadout tune` for DRAFTER. Parts that are already in the result file are not
repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.progress import track

import common
import result_charts
from leadout.bench.setup import common_flags
from leadout.bench.turns import in_waves
from leadout.checkpoints import read_checkpoint
from leadout.engine.load_test import LoadRequest, LoadResult, client_session
from leadout.engine.server import Server
from leadout.engine.server_turns import RunningServer
from result_charts import PHASES

OUT = Path(__file__).resolve().parents[1] / "results" / "live" / "smollm2.json"
TRAFFIC_REQUESTS = {1: 4, 8: 16}  # of a phase, by concurrency
CATEGORIES = ("summarization", "rag", "coding", "qa", "writing", "translation")
PROMPT_LOOKUP_REQUESTS = 4
TOKENS = 64
SECONDS = 4.0  # of a phase
Rates = dict[str, float]  # output tokens per second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "drafter", "tuned", "prompts", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["traffic", "copying"])
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    for part in (traffic, copying):
        name = part.__name__
        if name not in found and arguments.only in (None, name):
            found[name] = part(arguments)
            found["provenance"] = common.provenance(
                target=arguments.target, drafter=arguments.drafter
            )
            write(found)
    print(json.dumps({k: v for k, v in found.items() if isinstance(v, float)}, indent=2))


def write(found: dict[str, Any]) -> None:
    """The result with the summary numbers of the finished parts first."""
    if "traffic" in found:
        ratios = found["traffic"]["ratios"].values()
        found["phase_worst_ratio"] = min(each["worst_phase"] for each in ratios)
        found["overall_ratio_to_best_single"] = min(each["overall"] for each in ratios)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=2) + "\n")
    OUT.with_suffix(".svg").write_text(result_charts.live(found))


def traffic(arguments: Any) -> dict[str, Any]:
    max_k = read_checkpoint(arguments.drafter).config.max_draft_tokens
    drafting = ["--draft", str(arguments.drafter)]
    tuned = [*drafting, "--tuned", str(arguments.tuned)]
    arms = {
        "bare": [],
        "fixed-2": [*drafting, *draft_length(2)],
        f"fixed-{max_k}": [*drafting, *draft_length(max_k)],
        "tuned": tuned,
        "live": [*tuned, "--live"],
    }
    rounds: list[dict[str, Any]] = []
    with stage(arguments, arms) as run:
        for number in track(range(arguments.rounds), description="changing traffic"):
            for concurrency, requests in TRAFFIC_REQUESTS.items():
                for arm in rotated(list(arms), number):
                    phases = {
                        phase: run(arm, prompts_of(arguments, phase, number, requests), concurrency)
                        for phase in PHASES
                    }
                    about = {"round": number, "concurrency": concurrency, "arm": arm}
                    rounds.append({**about, "phases": phases})
    return {"ratios": {c: traffic_ratios(rounds, c) for c in TRAFFIC_REQUESTS}, "rounds": rounds}


def traffic_ratios(rounds: Sequence[dict[str, Any]], concurrency: int) -> dict[str, Any]:
    """Ratios of live control to the best fixed length of each phase, and to every arm overall.

    Bare vLLM counts as a fixed length. Phases have the same number of tokens.
    """
    here = [each for each in rounds if each["concurrency"] == concurrency]
    by_round = {number: {e["arm"]: e["phases"] for e in here if e["round"] == number}
                for number in {e["round"] for e in here}}  # fmt: skip
    others = [arm for arm in next(iter(by_round.values())) if arm != "live"]
    fixed = [arm for arm in others if arm != "tuned"]

    def median(ratio: Any) -> float:
        return statistics.median(ratio(arms) for arms in by_round.values())

    phases = {
        phase: min(median(lambda a, f=f, p=phase: a["live"][p] / a[f][p]) for f in fixed)
        for phase in PHASES
    }
    whole = {arm: median(lambda a, o=arm: over_all(a["live"]) / over_all(a[o])) for arm in others}
    return {
        "to_best_fixed_by_phase": phases,
        "worst_phase": min(phases.values()),
        "to_each_arm_over_all": whole,
        "overall": min(whole.values()),
    }


def over_all(phases: Mapping[str, float]) -> float:
    return statistics.harmonic_mean(phases.values())


def copying(arguments: Any) -> dict[str, Any]:
    live = ["--draft", str(arguments.drafter), "--tuned", str(arguments.tuned), "--live"]
    without = {"leadout": {"live": {"prompt_lookup_min_match": 0}}}
    arms = {"live": live, "without": [*live, "--additional-config", json.dumps(without)]}
    rounds: list[dict[str, Any]] = []
    with stage(arguments, arms) as run:
        for number in track(range(arguments.rounds), description="prompt lookup"):
            for category in CATEGORIES:
                texts = prompts_of(arguments, category, number, PROMPT_LOOKUP_REQUESTS)
                rates = {arm: run(arm, texts, 1) for arm in rotated(list(arms), number)}
                rounds.append({"round": number, "category": category, **rates})
    ratios = {
        name: statistics.median(r["live"] / r["without"] for r in rounds if r["category"] == name)
        for name in CATEGORIES
    }
    return {"ratios": ratios, "rounds": rounds}


@contextmanager
def stage(arguments: Any, arms: Mapping[str, list[str]]) -> Iterator[Any]:
    """Running servers, and a function that measures the throughput of one of them."""
    flags = [*common_flags([16], on_cpu=True, servers=len(arms)), "--max-model-len", "2048"]
    with ExitStack() as stack:
        servers = {}
        for name, arm_flags in track(arms.items(), description="servers"):
            command = [sys.executable, "-m", "leadout", "serve", str(arguments.target)]
            log = arguments.work / f"{name}.log"
            servers[name] = stack.enter_context(Server([*command, *arm_flags, *flags], log=log))

        def run(arm: str, texts: Sequence[str], concurrency: int) -> float:
            request = LoadRequest(
                prompts=tuple(texts), concurrency=concurrency, output_tokens=TOKENS
            )
            return asyncio.run(load_for(servers[arm], request, SECONDS)).tokens_per_second

        for name in servers:  # every batch size once
            run(name, prompts_of(arguments, "gsm8k", 0, 16), 16)
        yield run


async def load_for(server: Server, request: LoadRequest, seconds: float) -> LoadResult:
    async with client_session() as session:
        alone = {"server": RunningServer("server", server, session)}
        rounds = in_waves(alone, request, seconds, random.Random(0), rounds=1)
        return (await anext(rounds))["server"]


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The same names, starting with another one."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


def draft_length(k: int) -> list[str]:
    return ["--speculative-config", json.dumps({"num_speculative_tokens": k})]


def prompts_of(arguments: Any, kind: str, number: int, count: int) -> list[str]:
    """First turns of a prompt set or a spec_bench category; each round has different ones."""
    path = arguments.prompts / f"{kind}.jsonl"
    lines = (path if path.exists() else arguments.prompts / "spec_bench.jsonl").open()
    records = [json.loads(line) for line in lines]
    turns = [r["turns"][0] for r in records if path.exists() or r["category"] == kind]
    return [turns[(number * count + i) % len(turns)] for i in range(count)]


if __name__ == "__main__":
    main()
