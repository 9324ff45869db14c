"""Peak resident memory of training: with ten times the data, and with larger targets.

Each run is a separate process that passes once over its data. Its peak is what Linux reports when
it ends. With ten times the data, for states computed and on disk; for each target, for states
computed in the process and by a server of hidden states:

    python experiments/train_memory.py --out results/train/memory.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import provenance

SAMPLES = 300
TIMES = 10
ANSWER = 96
MAX_GROWTH = 0.10
SOURCES = ("compute", "disk")
TARGET_SAMPLES, TARGET_ANSWER = 12, 20
# Of the runs with several targets: the same for all, so that only the target differs.
DRAFTER = {"layers": 1, "block_size": 4, "anchors": 2, "batch_sequences": 2, "max_length": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=4, help="of the processes that are measured")
    parser.add_argument("--url", default="", help="of a server of hidden states, for --one")
    arguments = parser.parse_args()
    if arguments.one:
        train_once(*arguments.one, arguments.url)
        return
    from support.models import cached_qwen_coder, cached_smollm2

    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        for source in SOURCES:
            small, large = (measure(folder, f"data-{n}", source) for n in (1, TIMES))
            growth = large["peak_mib"] / small["peak_mib"] - 1
            found[source] = {"small": small, "large": large, "growth": growth}
            print(source, found[source], flush=True)
        targets = {"SmolLM2-135M": cached_smollm2(), "Qwen2.5-Coder-1.5B": cached_qwen_coder()}
        by_target = {
            name: measure_target(folder / name, target) for name, target in targets.items()
        }
    result = {
        "provenance": provenance(**{name.replace("-", "_"): t for name, t in targets.items()}),
        "times": TIMES,
        "most_growth": MAX_GROWTH,
        "states": found,
        "targets": by_target,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if all(each["growth"] < MAX_GROWTH for each in found.values()) else 1)


def write_inputs(folder: Path) -> None:
    """The tiny target, and answers of random tokens: their content does not affect memory."""
    from leadout.shards import Sample
    from support.tiny_chat import write_tiny_chat_target
    from support.tiny_data import write_data

    target = write_tiny_chat_target(folder / "target")
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(250) for _ in range(count)]

    for times in (1, TIMES):
        samples = [
            Sample(
                id=f"asked/{number}#0/0",
                source="asked",
                prompt=tokens(12),
                response=tokens(ANSWER),
                temperature=0.0,
            )
            for number in range(times * SAMPLES)
        ]
        write_data(folder / f"data-{times}", target, samples)


def measure_target(folder: Path, target: Path) -> dict[str, Any]:
    """One small run for a target, with states from both sources."""
    from leadout.engine.states_server import states_server
    from leadout.evaluate.reference import loaded_bytes
    from leadout.evaluate.target_weights import EMBEDDING, HEAD, TargetFiles
    from leadout.pairing import read_target
    from leadout.pairing.target import spread_layer_ids
    from leadout.shards import Sample
    from support.tiny_data import write_data

    draw = random.Random(0)
    samples = [
        Sample(
            id=f"asked/{number}#0/0",
            source="asked",
            prompt=[draw.randrange(1000) for _ in range(8)],
            response=[draw.randrange(1000) for _ in range(TARGET_ANSWER)],
            temperature=0.0,
        )
        for number in range(TARGET_SAMPLES)
    ]
    folder.mkdir()
    (folder / "target").symlink_to(target)
    write_data(folder / "data", target, samples)
    import torch

    files = TargetFiles(target)
    held = [tensor for name in (EMBEDDING, HEAD) if (tensor := files.find(name)) is not None]
    found: dict[str, Any] = {
        "weights_mib": round(loaded_bytes(target, torch.float32) / 2**20, 1),
        "embedding_and_head_mib": round(sum(each.numel() for each in held) * 4 / 2**20, 1),
        "compute": measure(folder, "data", "compute"),
    }
    layers = spread_layer_ids(read_target(target).num_layers)
    # The server's own precision is that of the file: its memory is not what is measured.
    with states_server(target, layers, longest=32, dtype="auto") as url:
        found["served"] = measure(folder, "data", "served", url)
    print(target.name, found, flush=True)
    return found


def measure(folder: Path, data: str, source: str, url: str = "") -> dict[str, float]:
    out = folder / f"{data}-{source}"
    command = [sys.executable, __file__, "--one", folder / "target", folder / data, out, source]
    command += ["--url", url]
    # Otherwise the number of arenas, and so the peak, depends on thread timing.
    quiet = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, env={**os.environ, **quiet}, capture_output=True, text=True)
    if ended.returncode != 0:
        raise RuntimeError(ended.stderr[-3000:])
    result: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return result


def train_once(target: str, data: str, out: str, source: str, url: str) -> None:
    """One pass over all samples, and a validation."""
    import torch

    from leadout.data.manifest import DataFolder
    from leadout.evaluate.ranks import Ranks
    from leadout.pairing import read_target
    from leadout.train.config import TrainConfig
    from leadout.train.run import STATES, Run, complete_settings, read_corpus
    from leadout.train.states_source import served_states

    vocabulary = read_target(Path(target)).vocab_size
    is_tiny = len(list(DataFolder(Path(data)).samples())) != TARGET_SAMPLES
    config = TrainConfig.model_validate(
        {
            "layers": 1,
            "block_size": 5,
            "anchors": 16,
            "batch_sequences": 16,
            "max_length": 128,
            "micro_tokens": 2048,
            "epochs": 1.0,
            "validation_sequences": 8,
            "validate_every": 10**6,
            "save_every": 10,
            "precision": "float32",
            "states": source,
            "mask_token_id": 319,
            "states_from": [url] if url else [],
        }
        | ({} if is_tiny else DRAFTER | {"validation_sequences": 2})
    )
    corpus = read_corpus(DataFolder(Path(data)), Path(target), config, vocabulary)
    resolved = complete_settings(config, Path(target), corpus, vocabulary)
    alone = Ranks(0, 1, torch.device("cpu"))
    taps, longest = resolved.target_layer_ids or (), max(corpus.lengths)
    with served_states(Path(target), taps, resolved, longest, alone) as states:
        run = Run(Path(target), corpus, resolved, Path(out), alone, states=states)
        numbers = run.train(lambda _: None)
    on_disk = run.folder / STATES
    result = {
        "samples": len(corpus.samples),
        "steps": numbers.step,
        "states_mib": round(on_disk.stat().st_size / 2**20, 1) if on_disk.exists() else 0.0,
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10, 1),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
