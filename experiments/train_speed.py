"""Time training steps of an earlier commit and of this one on the same blocks, in turns.

    python experiments/train_speed.py TARGET DATA_FOLDER --before COMMIT

Each arm is a process with the sources of its commit and its own defaults for everything that does
not change the loss. The arms take turns step by step, so that both see the same machine. States are
computed before the first timed step. Writes results/train/speed.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "results" / "train" / "speed.json"
# As the shipped drafter was trained, with fewer sequences per step; and without a limited
# vocabulary in the loss.
COMMON = {
    "layers": 2,
    "max_length": 384,
    "learning_rate": 0.004,
    "precision": "bfloat16",  # the default
    "validation_sequences": 8,
    "states": "disk",
    "validate_every": 10**6,
    "save_every": 10**6,
}
CASES: dict[str, dict[str, Any]] = {
    "candidates": {"candidates": 8192, "anchors": 32, "batch_sequences": 16},
    "whole vocabulary": {"anchors": 32, "batch_sequences": 4, "candidates": None},
}
WARM_UP = 1  # steps before the timed ones


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--before", help="the earlier commit")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each arm")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--quiet-file", type=Path, help="exists while steps are timed")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # a child process: the name of its case
    arguments = parser.parse_args()
    if arguments.arm:
        run_arm(arguments)
    else:
        compare(arguments)


def compare(arguments: Any) -> None:
    from common import write_result

    with tempfile.TemporaryDirectory() as folder:
        earlier = Path(folder) / "before"
        git = ["git", "-C", str(ROOT)]
        subprocess.run(
            [*git, "worktree", "add", "--detach", str(earlier), arguments.before], check=True
        )
        try:
            trees = {"before": earlier, "after": ROOT}
            cases = {name: compare_case(arguments, name, trees) for name in CASES}
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(earlier)], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", arguments.before], check=True, capture_output=True, text=True
    )
    write_result(
        arguments.out,
        {"before_commit": commit.stdout.strip(), "steps": arguments.steps, "cases": cases},
        target=arguments.target,
    )


def compare_case(arguments: Any, case: str, trees: dict[str, Path]) -> dict[str, Any]:
    arms = {name: Arm(arguments, case, tree) for name, tree in trees.items()}
    for arm in arms.values():
        arm.ready()
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    if arguments.quiet_file:
        arguments.quiet_file.touch()
    try:
        for number in range(WARM_UP + arguments.steps):
            order = list(arms) if number % 2 == 0 else list(arms)[::-1]
            for name in order:
                steps[name].append(arms[name].step())
    finally:
        if arguments.quiet_file:
            arguments.quiet_file.unlink()
        for arm in arms.values():
            arm.close()
    found = {name: summary(each[WARM_UP:]) for name, each in steps.items()}
    before, after = found["before"], found["after"]
    return {
        "settings": COMMON | CASES[case],
        "arms": found,
        "losses": {name: [step["loss"] for step in each] for name, each in steps.items()},
        "times_the_blocks_per_second": after["blocks_per_second"] / before["blocks_per_second"],
        "processor_time_ratio": after["processor_seconds_per_block"]
        / before["processor_seconds_per_block"],
    }


def summary(steps: list[dict[str, float]]) -> dict[str, float]:
    blocks = sum(step["blocks"] for step in steps)
    return {
        "blocks": blocks,
        "blocks_per_second": blocks / sum(step["seconds"] for step in steps),
        "processor_seconds_per_block": sum(step["processor_seconds"] for step in steps) / blocks,
    }


class Arm:
    """A process that takes one training step for each line that it reads."""

    def __init__(self, arguments: Any, case: str, tree: Path) -> None:
        command = [
            *(sys.executable, Path(__file__).resolve(), arguments.target.resolve()),
            *(arguments.data.resolve(), "--arm", case, "--steps", str(arguments.steps)),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
        )

    def ready(self) -> None:
        self._answer()

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an arm ended with exit code {self._process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found


def run_arm(arguments: Any) -> None:
    """Train with whatever version of Leadout is on the path; what every version has is used."""
    import torch

    from leadout.data.manifest import DataFolder
    from leadout.evaluate.ranks import Ranks
    from leadout.pairing import read_target
    from leadout.train.config import TrainConfig
    from leadout.train.loop import sequences_of_step
    from leadout.train.run import Run, complete_settings, read_corpus

    class StopTraining(Exception):
        pass

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print

    def answer(content: dict[str, float]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()
        if not sys.stdin.readline():
            raise StopTraining

    clock = torch.zeros(2, dtype=torch.float64)

    def start_clock() -> None:
        clock[:] = torch.tensor([time.monotonic(), time.process_time()], dtype=torch.float64)

    config = TrainConfig(**COMMON, **CASES[arguments.arm], epochs=1.0)
    vocab_size = read_target(arguments.target).vocab_size
    corpus = read_corpus(DataFolder(arguments.data), arguments.target, config, vocab_size)
    config = complete_settings(config, arguments.target, corpus, vocab_size)
    steps = WARM_UP + arguments.steps + 1
    epochs = steps * config.batch_sequences / len(corpus.split.train)
    config = config.model_copy(update={"epochs": epochs})
    with tempfile.TemporaryDirectory() as folder:
        run = Run(arguments.target, corpus, config, Path(folder), Ranks(0, 1, torch.device("cpu")))
        for step in range(steps):
            for index in sequences_of_step(corpus.split.train, step, config):
                run.source.observe([run.fetch(index)])

        def after_step(record: Any) -> None:
            wall, processor = time.monotonic(), time.process_time()
            if not hasattr(record, "loss"):
                return
            seconds = wall - clock[0].item()
            indices = sequences_of_step(corpus.split.train, record.step - 1, config)
            blocks = sum(
                min(config.anchors, len(s) - s.prompt_length - 1)
                for s in (run.fetch(index)[1] for index in indices)
            )
            answer(
                {
                    "loss": record.loss,
                    "blocks": blocks,
                    "seconds": seconds,
                    "processor_seconds": processor - clock[1].item(),
                }
            )
            start_clock()

        try:
            answer({})
            start_clock()
            run.train(after_step)
        except StopTraining:
            pass


if __name__ == "__main__":
    main()
