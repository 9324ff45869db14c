"""Time of an engine step with vLLM's own drafter class over that with Leadout's: 1 is no overhead.

Each arm runs in a process of its own, in turn. The median over the steps of a run is compared, not
tokens per second: it is not moved by a disturbed second, nor by the drafts that were accepted.

    python scripts/measure_plugin_overhead.py TARGET DRAFTER PROMPTS --out FILE
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
from typing import Any

from rich.progress import track

from leadout.checkpoints import read_checkpoint
from leadout.provenance import Provenance

ARMS = {"leadout": {"LEADOUT_PLUGIN": "1"}, "stock": {"LEADOUT_PLUGIN": "0"}}
PROMPTS_AT = {1: 3, 8: 16}  # by concurrency: how many prompts
TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one-arm", action="store_true", help="used by the script itself")
    arguments = parser.parse_args()
    if arguments.one_arm:
        print("STEPS " + json.dumps(step_times(arguments)))
        return

    rounds = []
    for number in track(range(arguments.rounds), description="rounds"):
        order = list(ARMS)[:: 1 if number % 2 else -1]  # who begins changes every round
        rounds.append({arm: run_arm(arm) for arm in order})
    ratios = {
        f"concurrency {c}": [r["stock"][str(c)] / r["leadout"][str(c)] for r in rounds]
        for c in PROMPTS_AT
    }
    result = {
        "provenance": Provenance.of_this_run().model_dump(),
        "unit": "median milliseconds of a step, and the ratio stock over leadout",
        "ratios": {
            name: {"median": statistics.median(r), "lowest": min(r), "highest": max(r)}
            for name, r in ratios.items()
        },
        "rounds": rounds,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["ratios"], indent=2))


def run_arm(arm: str) -> dict[str, float]:
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    ended = subprocess.run(
        [sys.executable, *sys.argv, "--one-arm"],
        env={**os.environ, **settings, **ARMS[arm]},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    line = next(line for line in ended.stdout.splitlines() if line.startswith("STEPS "))
    medians: dict[str, float] = json.loads(line.removeprefix("STEPS "))
    return medians


def step_times(arguments: Any) -> dict[int, float]:
    from vllm import LLM, SamplingParams

    count = read_checkpoint(arguments.drafter).config.max_draft_tokens
    speculation = {"method": "dflash", "model": str(arguments.drafter)}
    llm = LLM(
        model=arguments.target,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        enable_prefix_caching=False,
        speculative_config={**speculation, "num_speculative_tokens": count},
    )
    durations: list[float] = []
    step = llm.llm_engine.step

    def timed_step() -> Any:
        started = time.perf_counter()
        outputs = step()
        durations.append(time.perf_counter() - started)
        return outputs

    llm.llm_engine.step = timed_step
    turns = [json.loads(line)["turns"][0] for line in arguments.prompts.open()]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    llm.generate(turns[-2:], params, use_tqdm=False)  # warm up
    medians = {}
    for concurrency, prompts in PROMPTS_AT.items():
        durations.clear()
        for first in range(0, prompts, concurrency):
            llm.generate(turns[first : first + concurrency], params, use_tqdm=False)
        medians[concurrency] = 1000 * statistics.median(durations)
    return medians


if __name__ == "__main__":
    main()
