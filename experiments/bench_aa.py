"""Bare vLLM against itself: the error of `leadout bench`, by the clock and by processor seconds.

    python experiments/bench_aa.py TARGET PROMPTS WORK_FOLDER

Two servers that are alike take turns in slices at four concurrencies. A second call continues where
the first stopped. Takes about ten minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from common import ROOT
from leadout.bench.report import print_result
from leadout.bench.run import bench
from leadout.bench.settings import BenchSettings
from leadout.console import Progress

OUT = ROOT / "results" / "bench" / "aa.json"
CONCURRENCIES = (1, 4, 8, 16)
ROUNDS, SECONDS, OUTPUT_TOKENS = 10, 3.0, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("work", type=Path)
    arguments = parser.parse_args()
    settings = BenchSettings(
        target=str(arguments.target),
        prompts=(str(arguments.prompts),),
        concurrency=CONCURRENCIES,
        rounds=ROUNDS,
        seconds=SECONDS,
        output_tokens=OUTPUT_TOKENS,
        server_flags=("--dtype", "float32", "--max-model-len", "2048"),
        out=arguments.work,
        resume=True,
    )
    with Progress("bench") as progress:
        result = bench(settings, progress)
    print_result(result)
    found = {
        "provenance": result.provenance.model_dump(),
        "target": result.settings.target,
        "turns": result.settings.turns,
        "rounds": ROUNDS,
        "seconds": SECONDS,
        "prompt_sets": list(result.settings.prompts),
        "cells": [cell.model_dump() for cell in result.bare_against_bare],
    }
    OUT.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
