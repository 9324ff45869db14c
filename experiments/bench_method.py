"""Which way of taking turns gives the narrowest interval per minute: bare vLLM against itself.

    python experiments/bench_method.py TARGET PROMPTS WORK_FOLDER

Two bare servers at concurrency 1 and 8, in slices and in waves, for the same number of rounds of
the same length. Writes `results/bench/method.json`: by the clock and by processor seconds, the
standard deviation of the log ratio of a round, the minutes that were needed, and the half width of
a 95% interval after ten minutes at that rate. Takes about ten minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any, Literal

from common import ROOT, write_result
from leadout.bench.run import bench
from leadout.bench.settings import BenchSettings
from leadout.bench.setup import BARE_AGAIN
from leadout.console import Advance, Progress

OUT = ROOT / "results" / "bench" / "method.json"
CONCURRENCIES = (1, 8)
TURNS: tuple[Literal["slices", "waves"], ...] = ("slices", "waves")
ROUNDS, SECONDS, OUTPUT_TOKENS = 10, 4.0, 128
MINUTES = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("work", type=Path)
    arguments = parser.parse_args()
    rows = [row for turns in TURNS for row in measure(turns, arguments)]
    write_result(OUT, {"rounds": ROUNDS, "seconds": SECONDS, "cells": rows})


def measure(turns: Literal["slices", "waves"], arguments: argparse.Namespace) -> list[Any]:
    settings = BenchSettings(
        target=str(arguments.target),
        prompts=(str(arguments.prompts),),
        concurrency=CONCURRENCIES,
        rounds=ROUNDS,
        seconds=SECONDS,
        turns=turns,
        output_tokens=OUTPUT_TOKENS,
        server_flags=("--dtype", "float32", "--max-model-len", "2048"),
        out=arguments.work / turns,
    )
    with TimedProgress("bench") as progress:
        result = bench(settings, progress)
    rows, before = [], 0.0
    cells = [cell for cell in result.cells if cell.arm == BARE_AGAIN]  # ascending concurrency
    for number, cell in enumerate(cells, start=1):
        ended = progress.seconds[number * ROUNDS - 1]
        minutes, before = (ended - before) / 60, ended
        rows.append(
            {
                "turns": turns,
                "concurrency": cell.concurrency,
                "minutes": minutes,
                "clock": summary([each.speedup for each in cell.rounds], minutes),
                "processor": summary([each.processor_ratio for each in cell.rounds], minutes),
            }
        )
    return rows


class TimedProgress(Progress):
    """Also notes when each round ended, in seconds since the first load began."""

    seconds: list[float]

    def stage(self, name: str, total: int | None = None, done: int = 0) -> Advance:
        advance, started = super().stage(name, total, done), time.monotonic()
        self.seconds = []

        def timed(steps: int = 1, note: str = "") -> None:
            self.seconds.append(time.monotonic() - started)
            advance(steps, note)

        return timed


def summary(ratios: list[float | None], minutes: float) -> dict[str, float]:
    logs = [math.log(ratio) for ratio in ratios if ratio is not None]
    deviation = statistics.stdev(logs)
    rounds_in_time = len(logs) * MINUTES / minutes
    return {
        "ratio": math.exp(statistics.fmean(logs)),
        "deviation_of_log_ratio": deviation,
        "half_width_after_10_minutes": 1.96 * deviation / math.sqrt(rounds_in_time),
    }


if __name__ == "__main__":
    main()
