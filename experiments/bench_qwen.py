"""Speed-up of the Qwen2.5-Coder-1.5B drafter over bare vLLM.

    python experiments/bench_qwen.py TARGET DRAFTER PROMPTS_FOLDER WORK_FOLDER

Four servers are up at a time, for the sake of memory: bare vLLM twice, which shows the error of the
method, and two that draft. `--arm` chooses what drafts: vLLM without Leadout, whose drafts are
worse on CPUs (docs/vllm-faults.md), with two fixed lengths, in slices; or `chosen`, which measures
`tuned` (the lengths of `leadout tune`) and `--live` in waves, because live control times its own
steps. A second call continues where the first stopped. Processors without instructions for bfloat16
are faster with `--dtype float32`. Writes results/bench/qwen2.5-coder-1.5b.json with all arms that
WORK_FOLDER has, and the tuned file beside it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT, store_tuned, write_result
from leadout.bench.page import RESULTS, write_files
from leadout.bench.report import print_result
from leadout.bench.results import BenchResult
from leadout.bench.run import bench
from leadout.bench.settings import BenchSettings
from leadout.console import Progress

RESULT = ROOT / "results" / "bench" / "qwen2.5-coder-1.5b.json"
TUNED = RESULT.with_name("qwen2.5-coder-1.5b-tuned.json")
LENGTHS = {"1 and 3": (1, 3), "5 and 7": (5, 7)}
CHOSEN = "chosen"
ARMS = (CHOSEN, *LENGTHS)
SETS = ("humaneval", "mbpp")
LOADS = (1, 4, 8, 16)
OUTPUT_TOKENS = 128
FLAGS = ("--max-model-len", "1024")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--arm", action="append", choices=ARMS, help="repeatable; default: all")
    parser.add_argument("--concurrency", type=int, action="append")
    parser.add_argument("--short", action="store_true", help="tune in minutes, acceptance roughly")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=6.0)
    arguments = parser.parse_args()
    for arm in arguments.arm or ARMS:
        measure(arm, arguments)
    files = {arm: folder_of(arm, arguments) / RESULTS for arm in ARMS}
    results = {
        arm: BenchResult.model_validate_json(path.read_text(encoding="utf-8"))
        for arm, path in files.items()
        if path.exists()
    }
    merged: dict[str, Any] = {
        "settings": {arm: found.settings.model_dump() for arm, found in results.items()},
        "cells": [
            {"against": arm, **cell.model_dump(exclude={"rounds"})}
            for arm, found in results.items()
            for cell in found.cells
        ],
        "geometric_means": [
            each.model_dump() for found in results.values() for each in found.geometric_means
        ],
        "bare_against_bare": [
            {"against": arm, **each.model_dump()}
            for arm, found in results.items()
            for each in found.bare_against_bare
        ],
    }
    write_result(RESULT, merged, target=arguments.target, drafter=arguments.drafter)


def folder_of(arm: str, arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.work / "bench" / arm.replace(" ", "-")
    return folder


def measure(arm: str, arguments: argparse.Namespace) -> None:
    """Bare vLLM twice, and two fixed lengths or both ways in which Leadout chooses them."""
    if arm == CHOSEN:
        chosen: dict[str, Any] = {"tuned": tune(arguments), "live": True}
    else:
        chosen = {"draft": (str(arguments.drafter),), "draft_tokens": LENGTHS[arm]}
    settings = BenchSettings(
        target=str(arguments.target),
        prompts=tuple(str(arguments.prompts / f"{each}.jsonl") for each in SETS),
        concurrency=tuple(arguments.concurrency or LOADS),
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        turns="waves" if arm == CHOSEN else "slices",
        output_tokens=OUTPUT_TOKENS,
        server_flags=("--dtype", arguments.dtype, "--max-num-seqs", str(max(LOADS)), *FLAGS),
        out=folder_of(arm, arguments),
        resume=True,
        **chosen,
    )
    with Progress("bench") as progress:
        result = bench(settings, progress)
    write_files(result, settings.out)
    print_result(result)


def tune(arguments: argparse.Namespace) -> Path:
    tuned: Path = arguments.work / "tuned.json"
    if not tuned.exists():
        command = [sys.executable, "-m", "leadout", "tune", arguments.target, arguments.drafter]
        flags = ["--max-batch", max(arguments.concurrency or LOADS), "--out", tuned, *FLAGS]
        flags += ["--dtype", arguments.dtype]
        flags += ["--short"] if arguments.short else []
        subprocess.run([str(word) for word in [*command, *flags]], check=True)
    store_tuned(tuned, TUNED)
    return tuned


if __name__ == "__main__":
    main()
