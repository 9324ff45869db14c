"""Speed-up of the shipped drafter over bare vLLM, with bare vLLM against itself as the error.

    python experiments/bench_smollm2.py TARGET PROMPTS_FOLDER WORK_FOLDER

Three prompt sets at four concurrencies. The arms are four fixed draft lengths in vLLM without
Leadout, `tuned` (the lengths of `leadout tune`) and `live` (a length chosen at every step). Servers
take turns in waves, because live control learns from no step in which its server was stopped.
Processors without instructions for bfloat16 are faster with `--dtype float32`. Takes an hour on two
idle cores; a second call continues where the first stopped. Writes `results/bench/smollm2.*`, and
bare vLLM against itself as `aa.json`. The eight servers need 30 GB of memory.

`--chosen-lengths` measures `tuned` and `live` alone, in half the time, and writes
`results/bench/smollm2-live.json`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT, SHIPPED, store_tuned
from leadout.bench.page import PICTURE, REPORT, RESULTS, write_files
from leadout.bench.report import print_result
from leadout.bench.results import BenchResult
from leadout.bench.run import bench
from leadout.bench.settings import BenchSettings
from leadout.console import Progress

OUT = ROOT / "results" / "bench"
SETS = ("gsm8k", "humaneval", "mt_bench")
CONCURRENCIES = (1, 4, 8, 16)
FIXED = (1, 3, 5, 7)  # draft tokens per step
ROUNDS, SECONDS, OUTPUT_TOKENS = 6, 2.0, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--chosen-lengths", action="store_true", help="only tuned and live")
    arguments = parser.parse_args()
    fixed: dict[str, Any] = (
        {} if arguments.chosen_lengths else {"draft": (str(SHIPPED),), "draft_tokens": FIXED}
    )
    arguments.work.mkdir(parents=True, exist_ok=True)
    OUT.mkdir(parents=True, exist_ok=True)
    tuned = tune(arguments.target, arguments.work, arguments.dtype)
    settings = BenchSettings(
        target=str(arguments.target),
        tuned=tuned,
        live=True,
        turns="waves",
        prompts=tuple(str(arguments.prompts / f"{each}.jsonl") for each in SETS),
        concurrency=CONCURRENCIES,
        rounds=ROUNDS,
        seconds=SECONDS,
        output_tokens=OUTPUT_TOKENS,
        server_flags=("--dtype", arguments.dtype, "--max-model-len", "2048"),
        out=arguments.work / "bench",
        resume=True,
        **fixed,
    )
    with Progress("bench") as progress:
        result = bench(settings, progress)
    write_files(result, settings.out)
    print_result(result)
    if arguments.chosen_lengths:
        shutil.copyfile(settings.out / RESULTS, OUT / "smollm2-live.json")
        return
    for written, suffix in ((RESULTS, "json"), (REPORT, "html"), (PICTURE, "svg")):
        shutil.copyfile(settings.out / written, OUT / f"smollm2.{suffix}")
    write_error_of_method(result)


def tune(target: Path, work: Path, dtype: str) -> Path:
    tuned = work / "tuned.json"
    if not tuned.exists():
        command = [sys.executable, "-m", "leadout", "tune", str(target), str(SHIPPED)]
        flags = ["--max-batch", str(max(CONCURRENCIES)), "--dtype", dtype, "--out", str(tuned)]
        subprocess.run([*command, *flags], check=True)
    store_tuned(tuned, OUT / "smollm2-tuned.json")
    return tuned


def write_error_of_method(result: BenchResult) -> None:
    """Bare vLLM on two servers that are alike, by the clock and by processor seconds."""
    settings, provenance = result.settings, result.provenance.model_dump()
    cells = [
        {**cell.model_dump(), "within_3_percent": abs(cell.ratio - 1) <= 0.03}
        for cell in result.bare_against_bare
    ]
    found = {
        "provenance": provenance,
        "target": settings.target,
        "turns": settings.turns,
        "rounds": settings.rounds,
        "seconds": settings.seconds,
        "prompt_sets": list(settings.prompts),
        "servers": len(settings.arms),
        "cells": cells,
    }
    (OUT / "aa.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
