"""Speed-up of the shipped drafter over bare vLLM, and of a random drafter, which must cost nothing.

    python experiments/bench_smollm2.py TARGET PROMPTS_FOLDER DATA_FOLDER WORK_FOLDER

Seven prompt sets at four concurrencies. `fixed` is vLLM's own DFlash with all drafts of the block.
`tuned` is that drafter as Leadout would serve it: with a draft vocabulary of the tokens that are
frequent in DATA_FOLDER, the answers that it was trained on, and with the draft lengths of `leadout
tune`. Then follows a drafter of the same shape with random weights on two sets. Takes about forty
minutes on two idle cores; a second call continues where the first stopped.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from common import ROOT, SHIPPED
from leadout.bench.page import PICTURE, REPORT, RESULTS, write_files
from leadout.bench.report import print_result
from leadout.bench.run import bench
from leadout.bench.settings import BenchSettings
from leadout.checkpoints import read_checkpoint, write_checkpoint
from leadout.console import Progress
from leadout.control.tuned_file import read_tuned, write_tuned
from leadout.dflash.drafter import Drafter
from leadout.errors import NEGATIVE, SUCCESS
from leadout.models import last_part

OUT = ROOT / "results" / "bench"
SETS = ("alpaca", "gsm8k", "humaneval", "math500", "mbpp", "mt_bench", "spec_bench")
SETS_OF_RANDOM = ("gsm8k", "mt_bench")
CONCURRENCIES = (1, 4, 8, 16)
ROUNDS, WAVES, OUTPUT_TOKENS = 3, 1, 64
DRAFT_VOCAB = 14_000  # of 49,152
FLAGS = ("--max-model-len", "2048")  # the longest prompt has 1568 tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    random = arguments.work / "random-drafter"
    if not random.exists():
        write_random(random)
    reduced = arguments.work / "reduced-drafter"
    if not reduced.exists():
        write_reduced(reduced, arguments.target, arguments.data)
    for name, drafter, tuned_drafter, sets in (
        ("smollm2", SHIPPED, reduced, SETS),
        ("random", random, random, SETS_OF_RANDOM),
    ):
        tuned = tune(name, tuned_drafter, arguments.target, arguments.work)
        measure(name, drafter, tuned, sets, arguments)


def write_reduced(folder: Path, target: Path, data: Path) -> None:
    convert = [sys.executable, "-m", "leadout", "convert", str(SHIPPED), str(folder)]
    how = ["--to", "speculators", "--target", str(target), "--frequent-in", str(data)]
    subprocess.run([*convert, *how, "--draft-vocab", str(DRAFT_VOCAB)], check=True)


def write_random(folder: Path) -> None:
    """A drafter with the shape of the shipped one and random weights."""
    config = read_checkpoint(SHIPPED).config
    torch.manual_seed(0)
    drafter = Drafter(config)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in drafter.state_dict().items()}
    write_checkpoint(folder, weights, config, "zlab")


def tune(name: str, drafter: Path, target: Path, work: Path) -> Path:
    tuned = work / f"{name}-tuned.json"
    if not tuned.exists():
        command = [sys.executable, "-m", "leadout", "tune", str(target), str(drafter)]
        flags = ["--max-batch", str(max(CONCURRENCIES)), "--out", str(tuned)]
        ended = subprocess.run([*command, *flags])
        assert ended.returncode in (SUCCESS, NEGATIVE)  # the random drafter does not pay
    keep_record(tuned)
    return tuned


def keep_record(tuned: Path) -> None:
    """A copy for the repository, without the folders of this machine."""
    found = read_tuned(tuned)
    models = {
        part: model.model_copy(update={"name": last_part(model.name)})
        for part, model in (("target", found.target), ("drafter", found.drafter))
    }
    OUT.mkdir(parents=True, exist_ok=True)
    write_tuned(found.model_copy(update=models), OUT / tuned.name)


def measure(name: str, drafter: Path, tuned: Path, sets: tuple[str, ...], arguments: Any) -> None:
    settings = BenchSettings(
        target=str(arguments.target),
        draft=(str(drafter),),
        tuned=tuned,
        prompts=tuple(str(arguments.prompts / f"{each}.jsonl") for each in sets),
        concurrency=CONCURRENCIES,
        rounds=ROUNDS,
        waves=WAVES,
        output_tokens=OUTPUT_TOKENS,
        server_flags=FLAGS,
        out=arguments.work / name,
        resume=True,
    )
    with Progress("bench") as progress:
        result = bench(settings, progress)
    write_files(result, settings.out)
    OUT.mkdir(parents=True, exist_ok=True)
    for written, suffix in ((RESULTS, "json"), (REPORT, "html"), (PICTURE, "svg")):
        shutil.copyfile(settings.out / written, OUT / f"{name}.{suffix}")
    print_result(result)


if __name__ == "__main__":
    main()
