"""Ten times `kill -9` on `leadout train`: the resumed run has the weights of an uninterrupted one.

The target is tiny and random. The moment of each kill is random, from a seed: some while the run
starts, most while it trains and saves. Weights, best weights and logs of both runs are compared:

    python experiments/train_kill.py --out results/train/kill.json

With --ranks the run has sharded weights and continues on 1, 2, 1, ... ranks in turn. Sums over
ranks have another order, so the weights are compared by how far training moved them:

    python experiments/train_kill.py --ranks --out results/train/kill_ranks.json
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from common import KillableCommand, write_result
from leadout.checkpoints import read_checkpoint
from leadout.dflash.config import DrafterConfig
from leadout.train.init import new_drafter
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
    *("--precision", "float32", "--states", "disk", "--learning-rate", "3e-3"),
    *("--save-every", "3"),
)
ON_ONE = ("--epochs", "40")
# Muon rounds its updates to bfloat16, where sums in another order show more.
ON_SEVERAL = ("--epochs", "16", "--optimizer", "adamw", "--sharded")
MAX_NEW_STEPS = 16  # before a kill, with several ranks; --save-every is less
MAX_SHARE = 0.01  # of the distance from the initial weights, with several ranks


class TrainCommand(KillableCommand):
    """`leadout train` on one folder."""

    working = "training"

    def __init__(self, folder: Path, out: str, flags: Sequence[str]) -> None:
        super().__init__(folder / f"{out}.log")
        self._folder, self._out, self._flags = folder, folder / out, flags
        self.run = self._out / "run"
        self.ranks = 1
        self.next_step = 0  # with a number, a run has begun to work when it has logged this step

    def command_line(self) -> list[Any]:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        start = [] if self.ranks == 1 else [*torchrun, "-m"]
        words = [sys.executable, "-m", *start, "leadout", "train", self._folder / "target"]
        words += ["--data", self._folder / "data", "--out", self._out, *FLAGS, *self._flags]
        return [*words, "--resume"] if (self._out / "training.yaml").exists() else words

    def progress(self) -> object:
        # A resumed run first truncates its log to the last checkpoint, then appends to it.
        if self.next_step:
            return max(self.steps(), default=0) >= self.next_step
        path = self.run / LOG
        return (path.stat().st_ino, path.stat().st_size) if path.exists() else (0, 0)

    def drafter_config(self) -> DrafterConfig:
        return read_checkpoint(self._out / "drafter").config

    def steps(self) -> list[int]:
        if not (self.run / LOG).exists():
            return []
        return [record.step for record in read_log(self.run) if isinstance(record, StepRecord)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", action="store_true", help="on 1, 2, 1, ... ranks")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = write_predictable_target(folder / "target")
        write_tiny_data(folder / "data", target, prompts=90)
        flags = ON_SEVERAL if arguments.ranks else ON_ONE
        uninterrupted, interrupted = (
            TrainCommand(folder, out, flags) for out in ("whole", "killed")
        )
        starting, _ = uninterrupted.run_to_the_end()
        seconds = starting, list(read_log(uninterrupted.run))[-1].seconds
        print(
            f"uninterrupted: {seconds[0]:.1f} s to the first step, {seconds[1]:.1f} s of training"
        )
        ranks = (1, 2) if arguments.ranks else (1,)
        kills = kill_again_and_again(interrupted, *seconds, random.Random(arguments.seed), ranks)
        interrupted.ranks, interrupted.next_step = 1, 0
        interrupted.run_to_the_end()
        differences = compare_moved if arguments.ranks else compare
        result = {
            "seed": arguments.seed,
            "kills": kills,
            **differences(uninterrupted, interrupted),
        }
    write_result(arguments.out, result)
    sys.exit(0 if result["equal"] else 1)


def kill_again_and_again(
    command: TrainCommand,
    starting: float,
    training: float,
    draw: random.Random,
    ranks: Sequence[int],
) -> list[dict[str, object]]:
    """Start and kill at a random moment, repeatedly; each run resumes the one before it.

    The starts have the numbers of `ranks` in turn.
    """
    early = set(draw.sample(range(KILLS), WHILE_STARTING))
    kills: list[dict[str, object]] = []
    for number in range(KILLS):
        command.ranks = ranks[number % len(ranks)]
        if len(ranks) > 1:  # their steps take different times, so the moments are steps
            command.next_step = max(command.steps(), default=0) + draw.randint(4, MAX_NEW_STEPS)
        delay, phase = command.kill_at(
            draw,
            starting if number in early else None,
            training / KILLS if len(ranks) == 1 else 0.5,
        )
        kills.append(
            {
                "after": f"{delay:.3f} s of {phase}",
                "ranks": command.ranks,
                "logged_step": max(command.steps(), default=0),
                "torn_checkpoints": len(list(command.run.glob(".*.partial"))),
            }
        )
        print(kills[-1], flush=True)
    return kills


def compare(uninterrupted: TrainCommand, interrupted: TrainCommand) -> dict[str, object]:
    """Compare every tensor of both runs, optimizer state included, and every step of both logs."""
    found = compare_logs(uninterrupted, interrupted)
    equal = bool(found["every_step_once"])
    for file in (STATE, BEST):
        expected, got = (load_file(command.run / file) for command in (uninterrupted, interrupted))
        apart = max((got[name] - expected[name]).abs().max().item() for name in expected)
        found[f"largest_difference_in_{file}"] = apart
        equal &= expected.keys() == got.keys() and all(
            torch.allclose(got[name], expected[name], atol=ABSOLUTE, rtol=RELATIVE)
            for name in expected
        )
    return {**found, "absolute": ABSOLUTE, "relative": RELATIVE, "equal": equal}


def compare_moved(uninterrupted: TrainCommand, interrupted: TrainCommand) -> dict[str, object]:
    """Compare the final weights with how far training moved them, and every step of both logs."""
    found = compare_logs(uninterrupted, interrupted)
    expected, got = (load_file(command.run / STATE) for command in (uninterrupted, interrupted))
    initial = new_drafter(uninterrupted.drafter_config(), seed=0)
    shares = {}
    for name, weight in initial.named_parameters():
        moved = (expected[f"weights.{name}"] - weight).norm()
        shares[name] = (
            (got[f"weights.{name}"] - expected[f"weights.{name}"]).norm() / moved
        ).item()
    equal = bool(found["every_step_once"]) and expected.keys() == got.keys()
    equal &= max(shares.values()) < MAX_SHARE
    largest = max(shares.values())
    return {**found, "largest_share_of_movement": largest, "max_share": MAX_SHARE, "equal": equal}


def compare_logs(uninterrupted: TrainCommand, interrupted: TrainCommand) -> dict[str, object]:
    steps = [
        [record for record in read_log(command.run) if isinstance(record, StepRecord)]
        for command in (uninterrupted, interrupted)
    ]
    losses = zip(*([record.loss for record in log] for log in steps), strict=False)
    return {
        "steps": len(steps[0]),
        "steps_after_kills": len(steps[1]),
        "every_step_once": [r.step for r in steps[1]] == list(range(1, len(steps[0]) + 1)),
        "largest_difference_of_losses": max(abs(a - b) for a, b in losses),
    }


if __name__ == "__main__":
    main()
