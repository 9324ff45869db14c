"""The pause of a swap by the size of the drafter, against a bare copy of the same bytes.

vLLM's drafter module is loaded in this process, in bfloat16, and a second version is staged as in a
worker. Per repetition, in turns: a bare copy of the same bytes, and the commit of the staged
swap. Measured are both ways in which weights are replaced:

- `copied`: layers that keep their weights as tensors, as on GPUs, here in host memory;
- `packed`: layers whose weights are packed by CPU kernels, as a CPU server has them.

`reload` is vLLM's layerwise reload of the same weights, which checks all values within the pause.

    python experiments/swap_size.py --out results/swap/size.json
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import common

# Layers of a drafter with hidden size 2048: 50 million parameters each, and 21 million in `fc`.
LAYERS = {"0.1B": 2, "0.5B": 10, "1B": 20}
KINDS = ("copied", "packed")
REPETITIONS = 7
MAX_RATIO = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=3, help="of the processes that are measured")
    arguments = parser.parse_args()
    if arguments.one:
        folder, layers, kind = arguments.one
        print(json.dumps(measure(Path(folder), int(layers), kind)))
        return
    if arguments.out is None:
        parser.error("--out is required")
    cells = []
    for size, layers in LAYERS.items():
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--one", folder, str(layers), kind]
                run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            cells.append({"size": size, "kind": kind, **json.loads(run.stdout.splitlines()[-1])})
            print(cells[-1], flush=True)
    result = {
        "dtype": "bfloat16",
        "threads": torch.get_num_threads(),
        "repetitions": REPETITIONS,
        "max_ratio": MAX_RATIO,
        "cells": cells,
    }
    common.write_result(arguments.out, result)
    sys.exit(0 if all(cell["ratio"] <= MAX_RATIO for cell in cells) else 1)


def measure(folder: Path, layers: int, kind: str) -> dict[str, Any]:
    from leadout.checkpoints import load_weights, read_checkpoint
    from leadout.engine.staging import StagedSwap, runtime_weights, stage
    from support.served_drafter import (
        engine_config,
        load_served_drafter,
        one_process_group,
        serve_as_on_a_gpu,
    )

    parameters = write_versions(folder, layers)
    config = engine_config(folder / "target", folder / "0", 7, "bfloat16")
    patch = pytest.MonkeyPatch()
    if kind == "copied":
        serve_as_on_a_gpu(patch)
    with one_process_group(config):
        drafter = load_served_drafter(config)
        started = time.perf_counter()
        weights = load_weights(read_checkpoint(folder / "1"))
        checked = time.perf_counter()
        new = stage(drafter, torch.nn.Module(), weights)
        del weights
        swap = StagedSwap(drafter, new, runtime_weights(drafter).in_host_memory())
        done = time.perf_counter()
        pairs = [(tensor, new.tensors[name]) for name, tensor in swap.serving.tensors.items()]
        if kind == "packed":  # out of reach, so as many bytes elsewhere
            packed = load_weights(read_checkpoint(folder / "1")).values()
            memory = {tensor.shape: torch.zeros_like(tensor) for tensor in packed}
            pairs = [(memory[tensor.shape], tensor) for tensor in packed]
        bare, pauses = [], []
        for _ in range(REPETITIONS):
            bare.append(seconds(partial(copy, pairs)))
            swap.undo()
            pauses.append(seconds(swap.commit))
            swap.undo()
        del swap, new, pairs
        gc.collect()
        weights = load_weights(read_checkpoint(folder / "1"))
        reloaded = seconds(lambda: reload(config, drafter, weights))
    return {
        "parameters": parameters,
        "bare_copy_seconds": bare,
        "pause_seconds": pauses,
        "ratio": sorted(pauses)[REPETITIONS // 2] / sorted(bare)[REPETITIONS // 2],
        "reload_seconds": reloaded,
        "check_seconds": checked - started,  # while requests run, as is staging
        "stage_seconds": done - checked,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for destination, source in pairs:
        destination.copy_(source)


def reload(config: Any, drafter: Any, weights: Mapping[str, Tensor]) -> None:
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(drafter)
    drafter.load_weights(weights.items())
    finalize_layerwise_reload(drafter, config.speculative_config.draft_model_config)


def write_versions(folder: Path, layers: int) -> int:
    """A target of which only the config matters, and two versions; returns their parameters."""
    from transformers import LlamaConfig

    from leadout.checkpoints import read_checkpoint, write_checkpoint
    from leadout.checkpoints.tensors import expected_shapes
    from leadout.dflash.config import DrafterConfig, LayerAttention, Rope

    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 1024}
    LlamaConfig(
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=512,
        architectures=["LlamaForCausalLM"],
        **sizes,
    ).save_pretrained(folder / "target")
    config = DrafterConfig(
        **sizes,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        layers=(LayerAttention(),) * layers,
        rope=Rope(theta=10_000.0),
        max_positions=512,
        target_layer_ids=(1, 6, 11, 16, 21),
        target_num_layers=24,
        mask_token_id=7,
        block_size=8,
    )
    for version in ("0", "1"):
        torch.manual_seed(int(version))
        weights = {
            name: torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05)
            for name, shape in expected_shapes(config).items()
        }
        write_checkpoint(folder / version, weights, config, "zlab")
        del weights
        gc.collect()
    return read_checkpoint(folder / "1").tensors.parameters


if __name__ == "__main__":
    main()
