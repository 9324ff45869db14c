"""One rank of a training run, for torchrun: rank 0 writes the results.

torchrun --standalone --nproc-per-node 2 -m support.train_rank TARGET DATA SETTINGS OUT

SETTINGS are those of several runs by name, as JSON; each run has a folder of its name in OUT. With
a step and the name of a signal as the last arguments, a run that writes nothing but checkpoints
gets that signal in rank 0 when the step is logged.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from safetensors.torch import save_file

from leadout.data.manifest import DataFolder
from leadout.evaluate.ranks import Ranks, joined_ranks
from leadout.train.config import TrainConfig
from leadout.train.loop import sequences_of_step
from leadout.train.optimizer import sum_gradients_over_ranks
from leadout.train.progress import Record
from leadout.train.run import Run, complete_settings, read_corpus
from leadout.train.sharding import whole
from support.models import TINY_VOCAB

FIRST, VALIDATION = "first.safetensors", "validation.json"
BEFORE, FINAL = "before.safetensors", "final.safetensors"


def main() -> None:
    target, data, out = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[4])
    with joined_ranks() as ranks:
        for name, settings in json.loads(sys.argv[3]).items():
            config = TrainConfig(**settings)
            if len(sys.argv) > 5:
                step, sent = int(sys.argv[5]), signal.Signals[sys.argv[6]]
                train_and_die(target, DataFolder(data), config, out / name, ranks, step, sent)
            train_and_write(target, DataFolder(data), config, out / name, ranks)


def train_and_die(
    target: Path,
    data: DataFolder,
    config: TrainConfig,
    out: Path,
    ranks: Ranks,
    step: int,
    sent: signal.Signals,
) -> None:
    def listen(record: Record) -> None:
        if record.step == step:
            os.kill(os.getpid(), sent)

    corpus = read_corpus(data, target, config, TINY_VOCAB)
    config = complete_settings(config, target, corpus, TINY_VOCAB)
    Run(target, corpus, config, out, ranks).train(listen)


def train_and_write(
    target: Path, data: DataFolder, config: TrainConfig, out: Path, ranks: Ranks
) -> None:
    """The gradients of the first step, a validation before training, and the final weights."""
    corpus = read_corpus(data, target, config, TINY_VOCAB)
    run = Run(target, corpus, complete_settings(config, target, corpus, TINY_VOCAB), out, ranks)
    run.weights.clear_gradients()
    batch = [run.fetch(i) for i in sequences_of_step(corpus.split.train, 0, config)]
    denominator = float(config.batch_sequences * config.anchors)
    run.gradient.accumulate(batch[ranks.rank :: ranks.count], 0, denominator)
    if ranks.count > 1 and not run.weights.sharded:
        sum_gradients_over_ranks(run.weights.masters.values())
    gradients = {
        name: whole(p.grad).clone() for name, p in run.weights.masters.items() if p.grad is not None
    }
    before = {name: whole(weight).clone() for name, weight in run.weights.named().items()}
    validation = run.validate()
    numbers = run.train(lambda _: None)
    assert numbers.finished  # on every rank
    final = {name: whole(weight).clone() for name, weight in run.weights.named().items()}
    if ranks.is_leader:
        save_file(gradients, out / FIRST)
        save_file(before, out / BEFORE)
        save_file(final, out / FINAL)
        (out / VALIDATION).write_text(validation.model_dump_json())


if __name__ == "__main__":
    main()
