"""Live control with and without prompt lookup, by kind of text.

    python experiments/live_prompt_lookup.py TARGET DRAFTER TUNED PROMPTS_FOLDER WORK_FOLDER

Two servers that differ in prompt lookup only answer one request at a time, in waves of a few
seconds; every ratio is taken within a round. The kinds are categories of spec_bench. TUNED is a
file of `leadout tune` for DRAFTER. Takes about 8 minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.progress import track

from common import ROOT, write_result
from leadout.bench.setup import common_flags
from leadout.bench.turns import in_waves
from leadout.engine.load_test import LoadRequest, client_session
from leadout.engine.server import Server
from leadout.engine.server_turns import RunningServer
from leadout.stats import paired_ratio

OUT = ROOT / "results" / "live" / "prompt_lookup.json"
CATEGORIES = ("summarization", "rag", "coding", "qa", "writing", "translation")
TOKENS = 64
SECONDS = 3.0  # of a wave


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "drafter", "tuned", "prompts", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=4, help="other texts in every round")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    rounds = asyncio.run(measure(arguments))
    found = {
        "dtype": arguments.dtype,
        "output_tokens": TOKENS,
        "seconds": SECONDS,
        "ratio": {
            name: paired_ratio([[each["with"] / each["without"] for each in rates]]).model_dump()
            for name, rates in rounds.items()
        },
        "rounds": rounds,
    }
    write_result(OUT, found, target=arguments.target, drafter=arguments.drafter)


async def measure(arguments: Any) -> dict[str, list[dict[str, float]]]:
    """Output tokens per second of both servers, by category and round."""
    serve = [sys.executable, "-m", "leadout", "serve", str(arguments.target)]
    serve += ["--draft", str(arguments.drafter), "--tuned", str(arguments.tuned), "--live"]
    without = {"leadout": {"live": {"prompt_lookup_min_match": 0}}}
    arms = {"with": [], "without": ["--additional-config", json.dumps(without)]}
    flags = [*common_flags([1], on_cpu=True, servers=len(arms)), "--max-model-len", "2048"]
    flags += ["--dtype", arguments.dtype]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CATEGORIES}
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                Server([*serve, *more, *flags], log=arguments.work / f"{name}.log")
            )
            for name, more in arms.items()
        }
        async with client_session() as session:
            servers = {
                name: RunningServer(name, server, session) for name, server in started.items()
            }
            order = random.Random(0)
            for number in track(range(arguments.rounds + 1), description="rounds"):
                for category in CATEGORIES:
                    request = LoadRequest(
                        prompts=texts_of(arguments, category, number),
                        concurrency=1,
                        output_tokens=TOKENS,
                    )
                    wave = await anext(in_waves(servers, [request], SECONDS, order))
                    if number > 0:  # in the first round, live control learns its costs
                        rates = {name: found.tokens_per_second for name, found in wave.items()}
                        rounds[category].append(rates)
    return rounds


def texts_of(arguments: Any, category: str, number: int) -> tuple[str, ...]:
    """First turns of a category; each round has different ones."""
    with (arguments.prompts / "spec_bench.jsonl").open() as file:
        records = [json.loads(line) for line in file]
    turns = [each["turns"][0] for each in records if each["category"] == category]
    first, count = number * arguments.requests, arguments.requests
    return tuple(turns[(first + i) % len(turns)] for i in range(count))


if __name__ == "__main__":
    main()
