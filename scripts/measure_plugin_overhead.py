"""Throughput with Leadout's drafter class over that of vLLM's own, for the same drafter.

Arms alternate, each in a process of its own, so that noise of the machine hits both alike:

    python scripts/measure_plugin_overhead.py TARGET DRAFTER PROMPTS --rounds 4 \
        --out results/serve/overhead.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.progress import track

from leadout.provenance import Provenance

ARMS = {"leadout": {}, "stock": {"LEADOUT_PLUGIN": "0"}}
CONCURRENCIES = (1, 8)
TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one-arm", action="store_true", help="used by the script itself")
    arguments = parser.parse_args()
    if arguments.one_arm:
        measure(arguments.target, arguments.drafter, arguments.prompts)
        return

    rounds: list[dict[str, dict[str, float]]] = []
    for number in track(range(arguments.rounds), description="rounds"):
        # The other arm goes first in every other round.
        order = list(ARMS.items())[:: 1 if number % 2 == 0 else -1]
        rounds.append({name: run_arm(environment) for name, environment in order})
    ratios = {
        f"concurrency {c}": [r["leadout"][str(c)] / r["stock"][str(c)] for r in rounds]
        for c in CONCURRENCIES
    }
    result = {
        "provenance": Provenance.of_this_run().model_dump(),
        "unit": "output tokens per second, and their ratio leadout over stock",
        "ratios": {
            name: {
                "median": statistics.median(values),
                "lowest": min(values),
                "highest": max(values),
                "rounds": values,
            }
            for name, values in ratios.items()
        },
        "rounds": rounds,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["ratios"], indent=2))


def run_arm(environment: dict[str, str]) -> dict[str, float]:
    ended = subprocess.run(
        [sys.executable, *sys.argv, "--one-arm"],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    line = next(line for line in ended.stdout.splitlines() if line.startswith("RATES "))
    rates: dict[str, float] = json.loads(line.removeprefix("RATES "))
    return rates


def measure(target: str, drafter: str, prompts: Path) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=target,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        enable_prefix_caching=False,
        speculative_config={"method": "dflash", "model": drafter, "num_speculative_tokens": 3},
    )
    turns = [json.loads(line)["turns"][0] for line in prompts.open()]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    llm.generate(turns[:2], params, use_tqdm=False)  # warm up
    rates = {}
    for concurrency, count in zip(CONCURRENCIES, (6, 32), strict=True):
        asked = turns[2 : 2 + count]
        started = time.perf_counter()
        for first in range(0, count, concurrency):
            llm.generate(asked[first : first + concurrency], params, use_tqdm=False)
        rates[concurrency] = count * TOKENS / (time.perf_counter() - started)
    print("RATES " + json.dumps(rates))


if __name__ == "__main__":
    main()
