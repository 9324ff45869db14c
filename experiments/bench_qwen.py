"""Speed-up of the Qwen2.5-Coder-1.5B drafter over bare vLLM.

    python experiments/bench_qwen.py TARGET DRAFTER PROMPTS_FOLDER WORK_FOLDER

Four servers are up at a time, for the sake of memory: bare vLLM twice, which shows the error of the
method, and two that draft. `--run` chooses what drafts: vLLM without Leadout, whose drafts are
worse on CPUs (docs/vllm-faults.md), with two fixed lengths, in slices; or `tuned` (the lengths of
`leadout tune`, measured on the same prompt sets) and `--live` in waves, because live control times
its own steps. A second call continues where the first stopped. Processors without instructions for
bfloat16 are faster with `--dtype float32`, with which the four servers need 30 GB: what they do not
use after loading, such as weights that were copied for the kernels, may be in swap. Writes
results/bench/qwen2.5-coder-1.5b.json with all runs of this drafter that WORK_FOLDER or the file
has. The tuned file is beside it.
"""

from __future__ import annotations

import argparse
import json
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
from leadout.models import fingerprint

RESULT = ROOT / "results" / "bench" / "qwen2.5-coder-1.5b.json"
TUNED = RESULT.with_name("qwen2.5-coder-1.5b-tuned.json")
# Of a bench: what of each list is kept out of the result.
LISTS = {"cells": {"rounds"}, "geometric_means": set[str](), "bare_against_bare": set[str]()}
SETS = ("humaneval", "mbpp")
LOADS = (1, 4, 8, 16)
LENGTHS = {"1 and 3": (1, 3), "5 and 7": (5, 7)}
CHOSEN = "chosen"
RUNS = (CHOSEN, *LENGTHS)
OUTPUT_TOKENS = 128
FLAGS = ("--max-model-len", "1024")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--run", action="append", choices=RUNS, help="repeatable; default: all")
    parser.add_argument("--short", action="store_true", help="tune in minutes, acceptance roughly")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=6.0)
    arguments = parser.parse_args()
    for run in arguments.run or RUNS:
        measure(run, arguments)
    files = {run: folder_of(run, arguments) / RESULTS for run in RUNS}
    results = {
        run: BenchResult.model_validate_json(path.read_text(encoding="utf-8"))
        for run, path in files.items()
        if path.exists()
    }
    merged: dict[str, Any] = {"runs": {}, **{name: [] for name in LISTS}}
    earlier = earlier_result(arguments.drafter)
    for run in RUNS:
        if run in results:
            merged["runs"][run] = results[run].model_dump(include={"provenance", "settings"})
            for name, hidden in LISTS.items():
                rows = [each.model_dump(exclude=hidden) for each in getattr(results[run], name)]
                merged[name] += [{"run": run, **row} for row in rows]
        elif run in earlier["runs"]:
            merged["runs"][run] = earlier["runs"][run]
            for name in LISTS:
                merged[name] += [row for row in earlier[name] if row["run"] == run]
    write_result(RESULT, merged, target=arguments.target, drafter=arguments.drafter)


def folder_of(run: str, arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.work / "bench" / run.replace(" ", "-")
    return folder


def earlier_result(drafter: Path) -> dict[str, Any]:
    """What the result file has of this drafter."""
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    same = found["provenance"]["models"]["drafter"] == fingerprint(drafter)
    return found if same else {"runs": {}}


def measure(run: str, arguments: argparse.Namespace) -> None:
    """Bare vLLM twice, and two fixed lengths or both ways in which Leadout chooses them."""
    if run in LENGTHS:
        arms: dict[str, Any] = {
            "draft": (str(arguments.drafter),),
            "draft_tokens": LENGTHS[run],
            "turns": "slices",
        }
    else:
        arms = {"tuned": tune(arguments), "live": True, "turns": "waves"}
    settings = BenchSettings(
        target=str(arguments.target),
        prompts=prompt_files(arguments),
        concurrency=LOADS,
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        output_tokens=OUTPUT_TOKENS,
        server_flags=("--dtype", arguments.dtype, "--max-num-seqs", str(max(LOADS)), *FLAGS),
        out=folder_of(run, arguments),
        resume=True,
        **arms,
    )
    with Progress("bench") as progress:
        result = bench(settings, progress)
    write_files(result, settings.out)
    print_result(result)


def prompt_files(arguments: argparse.Namespace) -> tuple[str, ...]:
    return tuple(str(arguments.prompts / f"{each}.jsonl") for each in SETS)


def tune(arguments: argparse.Namespace) -> Path:
    tuned: Path = arguments.work / "tuned.json"
    if not tuned.exists():
        command = [sys.executable, "-m", "leadout", "tune", arguments.target, arguments.drafter]
        flags = ["--max-batch", max(LOADS), "--out", tuned, *FLAGS]
        flags += ["--dtype", arguments.dtype]
        flags += [word for path in prompt_files(arguments) for word in ("--prompts", path)]
        # Both servers fit, but not by an estimate of memory that has no swap.
        flags += ["--turns", "slices", *(["--short"] if arguments.short else [])]
        subprocess.run([str(word) for word in [*command, *flags]], check=True)
    store_tuned(tuned, TUNED)
    return tuned


if __name__ == "__main__":
    main()
