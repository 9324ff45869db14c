"""Ten times `kill -9` on `leadout train`: the run ends with the weights of an undisturbed one.

The target is tiny and random. Every kill comes at a moment drawn from a seed: some while the run
starts, most while it trains and saves. Then both runs are compared: weights, best weights, log:

    python scripts/kill_train.py --out results/train/kill.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from leadout.provenance import Provenance  # noqa: E402
from leadout.train.loop import BEST, STATE  # noqa: E402
from leadout.train.progress import LOG, StepRecord, read_log  # noqa: E402
from support.tiny_data import write_predictable_target, write_tiny_data  # noqa: E402

KILLS = 10
WHILE_STARTING = 2  # of the kills; the others come after the first new step
# Wide enough for a sum in another order, narrow enough to show one step too many or too few.
ABSOLUTE, RELATIVE = 1e-5, 1e-4
FLAGS = (
    *("--layers", "1", "--block-size", "5", "--anchors", "8", "--batch-sequences", "8"),
    *("--max-length", "128", "--validation-sequences", "8", "--validate-every", "40"),
    *("--precision", "float32", "--states", "disk", "--epochs", "40", "--learning-rate", "3e-3"),
    *("--save-every", "3"),
)
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}


class TrainCommand:
    """`leadout train` on one folder, as a process."""

    def __init__(self, folder: Path, out: str) -> None:
        self.run = folder / out / "run"
        self._resolved = folder / out / "training.yaml"
        self._words = [sys.executable, "-m", "leadout", "train", folder / "target"]
        self._words += ["--data", folder / "data", "--out", folder / out, *FLAGS]
        self._log = folder / f"{out}.log"

    def start(self) -> subprocess.Popen[bytes]:
        resume = ["--resume"] if self._resolved.exists() else []
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*self._words, *resume], stdout=log, stderr=log, env={**os.environ, **ONE_THREAD}
            )

    def run_to_the_end(self) -> tuple[float, float]:
        """Seconds until the first new step, and from there to the last."""
        started = time.monotonic()
        process = self.start()
        self.wait_for_a_step(process)
        training = time.monotonic()
        if process.wait() != 0:
            raise RuntimeError(f"leadout train failed:\n{self._log.read_text()[-3000:]}")
        return training - started, list(read_log(self.run))[-1].seconds

    def wait_for_a_step(self, process: subprocess.Popen[bytes]) -> None:
        """A continued run first cuts its log back to the last checkpoint, then adds to it."""
        before = self.log_file()
        while process.poll() is None and self.log_file() == before:
            time.sleep(0.002)

    def log_file(self) -> tuple[int, int]:
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
        undisturbed, disturbed = TrainCommand(folder, "whole"), TrainCommand(folder, "killed")
        seconds = undisturbed.run_to_the_end()
        print(f"undisturbed: {seconds[0]:.1f} s to the first step, {seconds[1]:.1f} s of training")
        kills = kill_again_and_again(disturbed, *seconds, random.Random(arguments.seed))
        disturbed.run_to_the_end()
        result = {
            "provenance": Provenance.of_this_run().model_dump(),
            "seed": arguments.seed,
            "kills": kills,
            **compare(undisturbed, disturbed),
        }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    sys.exit(0 if result["equal"] else 1)


def kill_again_and_again(
    command: TrainCommand, starting: float, training: float, draw: random.Random
) -> list[dict[str, object]]:
    """Start, kill at a drawn moment, and so on; each run goes on where the last was cut off."""
    early = set(draw.sample(range(KILLS), WHILE_STARTING))
    kills: list[dict[str, object]] = []
    for number in range(KILLS):
        process = command.start()
        if number in early:
            delay = draw.uniform(0, starting)
        else:
            command.wait_for_a_step(process)
            # So that all of them together fit into the run.
            delay = draw.uniform(0, training / KILLS)
        time.sleep(delay)
        if process.poll() is not None:
            raise RuntimeError(f"run {number} ended before its kill; give it more epochs")
        process.kill()
        process.wait()
        kills.append(
            {
                "after": f"{delay:.3f} s of " + ("starting" if number in early else "training"),
                "logged_step": max(command.steps(), default=0),
                "torn_checkpoints": len(list(command.run.glob(".*.partial"))),
            }
        )
        print(kills[-1], flush=True)
    return kills


def compare(undisturbed: TrainCommand, disturbed: TrainCommand) -> dict[str, object]:
    """Every tensor of both runs, optimiser state included, and every step of both logs."""
    steps = [
        [record for record in read_log(command.run) if isinstance(record, StepRecord)]
        for command in (undisturbed, disturbed)
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
        wanted, got = (load_file(command.run / file) for command in (undisturbed, disturbed))
        apart = max((got[name] - wanted[name]).abs().max().item() for name in wanted)
        found[f"largest_difference_in_{file}"] = apart
        equal &= wanted.keys() == got.keys() and all(
            torch.allclose(got[name], wanted[name], atol=ABSOLUTE, rtol=RELATIVE) for name in wanted
        )
    return {**found, "absolute": ABSOLUTE, "relative": RELATIVE, "equal": equal}


if __name__ == "__main__":
    main()
