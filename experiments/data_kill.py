"""Ten times `kill -9` on `leadout data`: the resumed job has the samples of an uninterrupted run.

The target is tiny and random. The moment of each kill is random, from a seed: some while the engine
starts, most while it answers. The samples of both runs are compared one by one:

    python experiments/data_kill.py --out results/data/kill.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import KillableCommand, write_result
from leadout.data.manifest import DataFolder, shard_path
from support.prompts import PROMPTS
from support.tiny_chat import write_tiny_chat_target

KILLS = 10
WHILE_STARTING = 3  # of the kills; the others come after the first new sample
CONVERSATIONS = 500  # every second one of two turns
OWN_PROMPTS = 100
FLAGS = (
    *("--max-new-tokens", "48", "--max-length", "400", "--concurrency", "8"),
    *("--greedy-share", "0.5", "--temperature", "0.7", "--top-p", "1"),
    *("--dtype", "float32", "--prompts", f"self:{OWN_PROMPTS}"),
)


class DataCommand(KillableCommand):
    """`leadout data` on one folder."""

    working = "answering"

    def __init__(self, folder: Path, out: str) -> None:
        super().__init__(folder / f"{out}.log")
        self._folder = folder
        self.out = folder / out
        self.shard = shard_path(self.out, 1, 1)

    def command_line(self) -> list[Any]:
        words = [sys.executable, "-m", "leadout", "data", self._folder / "target", "--resume"]
        return [*words, "--prompts", self._folder / "asked.jsonl", "--out", self.out, *FLAGS]

    def progress(self) -> int:
        return self.shard.stat().st_size if self.shard.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_chat_target(folder / "target")
        write_prompts(folder / "asked.jsonl")
        uninterrupted, interrupted = DataCommand(folder, "whole"), DataCommand(folder, "killed")
        seconds = uninterrupted.run_to_the_end()
        print(f"uninterrupted: {seconds[0]:.1f} s to the first sample, {seconds[1]:.1f} s more")
        kills = kill_again_and_again(interrupted, *seconds, random.Random(arguments.seed))
        interrupted.run_to_the_end()
        result = {
            "seed": arguments.seed,
            "kills": kills,
            **compare(DataFolder(uninterrupted.out), DataFolder(interrupted.out)),
        }
    write_result(arguments.out, result)
    sys.exit(0 if result["equal"] else 1)


def write_prompts(path: Path) -> None:
    with path.open("w") as file:
        for number in range(CONVERSATIONS):
            turns = [f"{number}. {PROMPTS[number % len(PROMPTS)]}", "And then?"]
            file.write(json.dumps({"turns": turns[: 1 + number % 2]}) + "\n")


def kill_again_and_again(
    command: DataCommand, starting: float, answering: float, draw: random.Random
) -> list[dict[str, object]]:
    """Start and kill at a random moment, repeatedly; each run resumes the one before it."""
    early = set(draw.sample(range(KILLS), WHILE_STARTING))
    kills: list[dict[str, object]] = []
    for number in range(KILLS):
        before = command.shard.read_bytes() if command.shard.exists() else b""
        delay, phase = command.kill_at(
            draw, starting if number in early else None, answering / KILLS
        )
        after = command.shard.read_bytes() if command.shard.exists() else b""
        whole = before[: before.rfind(b"\n") + 1]
        if not after.startswith(whole):
            raise RuntimeError(f"run {number} changed samples that were written before it")
        kills.append(
            {
                "after": f"{delay:.3f} s of {phase}",
                "new_samples": after.count(b"\n") - whole.count(b"\n"),
                "samples": after.count(b"\n"),
                "torn_bytes": len(after) - after.rfind(b"\n") - 1,
            }
        )
        print(kills[-1], flush=True)
    return kills


def compare(uninterrupted: DataFolder, interrupted: DataFolder) -> dict[str, object]:
    """Compare every sample of both; reading them rejects duplicates."""
    expected = {sample.id: sample for sample in uninterrupted.samples()}
    found = {sample.id: sample for sample in interrupted.samples()}
    return {
        "samples": len(expected),
        "response_tokens": uninterrupted.response_tokens,
        "samples_after_kills": len(found),
        "missing": len(expected.keys() - found.keys()),
        "different": sum(found[name] != expected[name] for name in expected.keys() & found.keys()),
        "same_manifest": interrupted.manifests == uninterrupted.manifests,
        "equal": found == expected and interrupted.content_hash() == uninterrupted.content_hash(),
    }


if __name__ == "__main__":
    main()
