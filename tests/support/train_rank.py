"""One rank of a training run, for torchrun: rank 0 writes the results.

torchrun --standalone --nproc-per-node 2 -m support.train_rank TARGET DATA SETTINGS OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from leadout.data.manifest import DataFolder
from leadout.evaluate.ranks import Ranks, joined_ranks
from leadout.train.config import TrainConfig
from leadout.train.loop import sequences_of_step
from leadout.train.run import Run, complete_settings, read_corpus
from leadout.train.state import sum_gradients_over_ranks
from support.models import TINY_VOCAB

FIRST, FINAL, VALIDATION = "first.safetensors", "final.safetensors", "validation.json"


def main() -> None:
    target, data, out = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[4])
    config = TrainConfig(**json.loads(sys.argv[3]))
    with joined_ranks() as ranks:
        train_and_write(target, DataFolder(data), config, out, ranks)


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
    if ranks.count > 1:
        sum_gradients_over_ranks(run.weights.masters.values())
    gradients = {
        name: p.grad.clone() for name, p in run.weights.masters.items() if p.grad is not None
    }
    validation = run.validate()
    numbers = run.train(lambda _: None)
    assert numbers.finished  # on every rank
    if ranks.is_leader:
        save_file(gradients, out / FIRST)
        save_file(run.weights.named(), out / FINAL)
        (out / VALIDATION).write_text(validation.model_dump_json())


if __name__ == "__main__":
    main()
