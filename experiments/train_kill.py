"""Ten times `kill -9` on `leadout train`: the resumed run has the weights of an uninterrupted one.

The target is tiny and random. The moment of each kill is random, from a seed: some while the run
starts, most while it trains and saves. Weights, best weights and logs of both runs are compared:

    python experiments/train_kill.py --out results/train/kill.json
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from common import KillableCommand, write_result
from leadout.train.progress import LOG, StepRecord, read_log
from leadout.train.state import BEST, STATE
from support.tiny_data import write_predictable_target, write_tiny_data

KILLS = 10
WHILE_STARTING = 2  # of the kills; the others come after the first new step
# Allows for sums in another order, but not for one step too many or too few.
ABSOLUTE, RELATIVE = 1e-5, 1e-4
FLAGS = (
    *("--layers", "1", "--block-size", "5", "--anchors", "8", "--batch-sequences", "8"),
    *("--max-length", "128", "--validation-sequences", "8", "--validate-every", "40"),
    *("--precision", "float32", "--states", "disk", "--epochs", "40", "--learning-rate", "3e-3"),
    *("--save-every", "3"),
)


class TrainCommand(KillableCommand):
    """`leadout train` on one folder."""

    working = "training"

    def __init__(self, folder: Path, out: str) -> None:
        super().__init__(folder / f"{out}.log")
        self._folder, self._out = folder, folder / out
        self.run = self._out / "run"

    def command_line(self) -> list[Any]:
        words = [sys.executable, "-m", "leadout", "train", self._folder / "target"]
        words += ["--data", self._folder / "data", "--out", self._out, *FLAGS]
        return [*words, "--resume"] if (self._out / "training.yaml").exists() else words

    def progress(self) -> tuple[int, int]:
        # A resumed run first truncates its log to the last checkpoint, then appends to it.
        path = self.run / LOG
        return (path.stat().st_ino, path.stat().st_size) if path.exists() else (0, 0)

    def steps(self) -> list[int]:
        if not (self.run / LOG).exists():
            return []
        return [record.step for record in read_log(self.run) if isinstance(record, StepRecord)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = write_predictable_target(folder / "target")
        write_tiny_data(folder / "data", target, prompts=90)
        uninterrupted, interrupted = TrainCommand(folder, "whole"), TrainCommand(folder, "killed")
        starting, _ = uninterrupted.run_to_the_end()
        seconds = starting, list(read_log(uninterrupted.run))[-1].seconds
        print(
            f"uninterrupted: {seconds[0]:.1f} s to the first step, {seconds[1]:.1f} s of training"
        )
        kills = kill_again_and_again(interrupted, *seconds, random.Random(arguments.seed))
        interrupted.run_to_the_end()
        result = {
            "seed": arguments.seed,
            "kills": kills,
            **compare(uninterrupted, interrupted),
        }
    write_result(arguments.out, result)
    sys.exit(0 if result["equal"] else 1)


def kill_again_and_again(
    command: TrainCommand, starting: float, training: float, draw: random.Random
) -> list[dict[str, object]]:
    """Start and kill at a random moment, repeatedly; each run resumes the one before it."""
    early = set(draw.sample(range(KILLS), WHILE_STARTING))
    kills: list[dict[str, object]] = []
    for number in range(KILLS):
        delay, phase = command.kill_at(
            draw, starting if number in early else None, training / KILLS
        )
        kills.append(
            {
                "after": f"{delay:.3f} s of {phase}",
                "logged_step": max(command.steps(), default=0),
                "torn_checkpoints": len(list(command.run.glob(".*.partial"))),
            }
        )
        print(kills[-1], flush=True)
    return kills


def compare(uninterrupted: TrainCommand, interrupted: TrainCommand) -> dict[str, object]:
    """Compare every tensor of both runs, optimizer state included, and every step of both logs."""
    steps = [
        [record for record in read_log(command.run) if isinstance(record, StepRecord)]
        for command in (uninterrupted, interrupted)
    ]
    once = [record.step for record in steps[1]] == list(range(1, len(steps[0]) + 1))
    losses = zip(*([record.loss for record in log] for log in steps), strict=False)
    found = {
        "steps": len(steps[0]),
        "steps_after_kills": len(steps[1]),
        "every_step_once": once,
        "largest_difference_of_losses": max(abs(a - b) for a, b in losses),
    }
    equal = once
    for file in (STATE, BEST):
        expected, got = (load_file(command.run / file) for command in (uninterrupted, interrupted))
        apart = max((got[name] - expected[name]).abs().max().item() for name in expected)
        found[f"largest_difference_in_{file}"] = apart
        equal &= expected.keys() == got.keys() and all(
            torch.allclose(got[name], expected[name], atol=ABSOLUTE, rtol=RELATIVE)
            for name in expected
        )
    return {**found, "absolute": ABSOLUTE, "relative": RELATIVE, "equal": equal}


if __name__ == "__main__":
    main()
