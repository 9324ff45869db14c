"""Short training runs that differ in one setting each, on the same data and for the same steps.

    python scripts/ablate_training.py TARGET DATA_FOLDER RUN_FOLDER DRAFTER --out FILE

RUN_FOLDER is that of a finished run on the same data: its states of the target are used again. The
settings are those of examples/smollm2-drafter.yaml, with fewer sequences a step. Variants of the
objective go on from DRAFTER, one that is half trained; variants of the shape and of the learning
rate start anew, and have a run of their own to be compared with. Early differences are no proof of
late ones; they tell what is worth a long run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from kept_states import link_states
from rich.progress import track

from leadout.data.manifest import DataFolder
from leadout.evaluate.ranks import Ranks
from leadout.pairing import read_target
from leadout.provenance import Provenance
from leadout.train.config import TrainConfig
from leadout.train.run import Run, read_corpus, resolve

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "examples" / "smollm2-drafter.yaml"
SEQUENCES = 16
GOES_ON: dict[str, dict[str, Any]] = {
    "no change": {},
    "hard labels only": {"distillation": 0.0},
    "the target's distribution only": {"distillation": 1.0},
    "AdamW": {"optimizer": "adamw"},
    "block size 4": {"block_size": 4},
    "block size 6": {"block_size": 6},
    "exponential position weights": {"position_weights": "exponential"},
    "a tenth of the data": {},
}
STARTS_ANEW: dict[str, dict[str, Any]] = {
    "from random weights": {},
    "from random weights, 1 layer": {"layers": 1},
    "from random weights, 4 layers": {"layers": 4},
    "from random weights, AdamW": {"optimizer": "adamw"},
    "from random weights, half the learning rate": {"learning_rate": 0.002},
    "from random weights, twice the learning rate": {"learning_rate": 0.008},
}
DATA_SHARE = {"a tenth of the data": 0.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--only", nargs="*", help="names of variants")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    on = {name: {"initial": str(arguments.drafter), **c} for name, c in GOES_ON.items()}
    variants = on | STARTS_ANEW
    names = arguments.only or list(variants)
    found = json.loads(arguments.out.read_text())["variants"] if arguments.out.exists() else {}
    for name in track([name for name in names if name not in found], description="variants"):
        trained = train(arguments, variants[name], DATA_SHARE.get(name, 1.0))
        found[name] = {"family": "goes on" if name in on else "starts anew", **trained}
        result = {
            "provenance": Provenance.of_this_run().model_dump(),
            "steps": arguments.steps,
            "sequences_per_step": SEQUENCES,
            "variants": found,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


def train(arguments: Any, changes: dict[str, Any], data_share: float) -> dict[str, Any]:
    short = {"batch_sequences": SEQUENCES, "compile": False, "validate_every": arguments.steps}
    config = TrainConfig.resolve(SETTINGS, {**short, **changes})
    vocab_size = read_target(arguments.target).vocab_size
    data = DataFolder(arguments.data)
    corpus = read_corpus(data, arguments.target, config, vocab_size)
    kept = corpus.split.train[: round(data_share * len(corpus.split.train))]
    corpus = replace(corpus, split=corpus.split._replace(train=kept))
    epochs = arguments.steps * SEQUENCES / len(corpus.split.train)
    config = config.model_copy(update={"epochs": epochs, "save_every": 10**6, "states": "disk"})
    config = resolve(config, arguments.target, corpus, vocab_size)
    with tempfile.TemporaryDirectory(dir=arguments.run) as folder:
        link_states(arguments.run, Path(folder))
        run = Run(arguments.target, corpus, config, Path(folder), Ranks(0, 1, torch.device("cpu")))
        began = time.process_time()
        records: list[Any] = []
        run.train(records.append)
        seconds = time.process_time() - began
    overall = records[-1].validation
    return {
        "changes": {n: v for n, v in changes.items() if v != str(arguments.drafter)},
        "cpu_seconds": seconds,
        "acceptance_length": overall.overall.acceptance_length,
        "by_position": overall.overall.by_position,
        "by_source": {n: f.acceptance_length for n, f in overall.by_source.items()},
    }


if __name__ == "__main__":
    main()
