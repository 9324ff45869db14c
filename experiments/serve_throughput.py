"""Throughput with Leadout's draft-model class relative to vLLM's own, for the same drafter.

Both engines run in one process and answer the same prompts in turn, a second or two each, so that
noise of the machine affects both alike. Which engine was built first affects its memory, so there
are two such processes, one in each order. All draft layers get the key norm of the first layer,
because on CPUs vLLM's own class would otherwise draft other tokens:

    python experiments/serve_throughput.py TARGET DRAFTER PROMPTS --out FILE
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.progress import track
from safetensors.torch import load_file, save_file

from common import provenance, tokens_per_second
from leadout.checkpoints import read_checkpoint
from leadout.stats import Ratio, paired_ratio

CLASSES = {
    "leadout": "leadout.engine.draft_model:ServedDrafter",
    "stock": "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM",
}
RUNS = {"leadout": "LeadoutDFlashForCausalLM", "stock": "DFlashQwen3ForCausalLM"}
PROMPTS_AT = {1: 1, 8: 8}  # prompts of a turn, by concurrency
TOKENS = 48
DTYPE = "float32"  # not every CPU computes in bfloat16
Rates = dict[str, dict[str, float]]  # of each engine, by concurrency


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", choices=list(CLASSES), help="used by the script itself")
    arguments = parser.parse_args()
    if arguments.first:
        print("RATES " + json.dumps(one_process(arguments)))
        return

    rounds = [r for first in CLASSES for r in rates_of_process(first)]
    result = {
        "provenance": provenance(target=arguments.target, drafter=arguments.drafter),
        "unit": "output tokens per second, and their ratio leadout over stock",
        "dtype": DTYPE,
        "ratios": {f"concurrency {c}": ratio(rounds, str(c)).model_dump() for c in PROMPTS_AT},
        "rounds": rounds,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["ratios"], indent=2))


def rates_of_process(first: str) -> list[Rates]:
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "LEADOUT_PLUGIN": "1"}
    ended = subprocess.run(
        [sys.executable, *sys.argv, "--first", first],
        env={"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, **settings},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    line = next(line for line in ended.stdout.splitlines() if line.startswith("RATES "))
    rounds: list[Rates] = json.loads(line.removeprefix("RATES "))
    return rounds


def one_process(arguments: Any) -> list[Rates]:
    turns = [json.loads(line)["turns"][0] for line in arguments.prompts.open()]
    names = [arguments.first, *(name for name in CLASSES if name != arguments.first)]
    with tempfile.TemporaryDirectory() as folder:
        # vLLM caches the class of a checkpoint by its path, so each engine has its own copy.
        engines = {
            name: start(name, arguments.target, one_key_norm(arguments.drafter, Path(folder, name)))
            for name in names
        }
        return [
            one_round(engines, turns, number)
            for number in track(range(arguments.rounds + 2), description=f"{names[0]} first")
        ][2:]  # the first two are warm-up


def one_key_norm(drafter: Path, copy: Path) -> Path:
    shutil.copytree(drafter, copy)
    (file,) = copy.glob("*.safetensors")
    weights = load_file(file)
    norms = sorted(name for name in weights if name.endswith("k_norm.weight"))
    weights |= {name: weights[norms[0]].clone() for name in norms}
    file.unlink()
    save_file(weights, file)
    return copy


def start(name: str, target: str, drafter: Path) -> Any:
    from vllm import LLM, ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # otherwise they would register later
    ModelRegistry.register_model("DFlashDraftModel", CLASSES[name])
    count = read_checkpoint(drafter).config.max_draft_tokens
    speculation = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": count}
    llm = LLM(
        model=target,
        dtype=DTYPE,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        enable_prefix_caching=False,
        speculative_config=speculation,
    )
    (taken,) = llm.collective_rpc(lambda worker: type(worker.get_draft_model()).__name__)
    if taken != RUNS[name]:
        raise RuntimeError(f"the engine {name!r} runs the class {taken}")
    return llm


def one_round(engines: dict[str, Any], turns: list[str], number: int) -> Rates:
    """Tokens per second of each engine and concurrency; the order alternates by round."""
    rates: Rates = {name: {} for name in engines}
    for concurrency, count in PROMPTS_AT.items():
        prompts = [turns[(number * count + i) % len(turns)] for i in range(count)]
        for name in list(engines)[:: 1 if number % 2 else -1]:
            rates[name][str(concurrency)] = tokens_per_second(engines[name], prompts, TOKENS)
    return rates


def ratio(rounds: list[Rates], concurrency: str) -> Ratio:
    return paired_ratio([[r["leadout"][concurrency] / r["stock"][concurrency] for r in rounds]])


if __name__ == "__main__":
    main()
