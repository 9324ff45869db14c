"""Throughput with Leadout's drafter class over that of vLLM's own, for the same drafter.

Both engines live in one process and answer in turn, a few seconds each, so that the noise of the
machine hits both alike:

    python scripts/measure_plugin_overhead.py TARGET DRAFTER PROMPTS --out FILE
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.progress import track

from leadout.checkpoints import read_checkpoint
from leadout.provenance import Provenance

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

STOCK_CLASS = "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM"
PROMPTS_AT = {1: 2, 8: 16}  # by concurrency: how many prompts a turn takes
TOKENS = 64
Rates = dict[str, dict[int, float]]  # of each engine, by concurrency


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    turns = [json.loads(line)["turns"][0] for line in arguments.prompts.open()]

    with tempfile.TemporaryDirectory() as folder:
        # vLLM remembers the class of a checkpoint by its path, so each engine has its own.
        copy = Path(folder) / "drafter"
        copy.mkdir()
        for file in arguments.drafter.iterdir():
            shutil.copyfile(file, copy / file.name)
        engines = {"leadout": start(arguments.target, arguments.drafter)}
        from vllm import ModelRegistry

        ModelRegistry.register_model("DFlashDraftModel", STOCK_CLASS)
        engines["stock"] = start(arguments.target, copy)
        classes = {name: drafter_class(engine) for name, engine in engines.items()}
        assert classes == {"leadout": "LeadoutDFlashForCausalLM", "stock": "DFlashQwen3ForCausalLM"}
        rounds = [
            one_round(engines, turns, number)
            for number in track(range(arguments.rounds + 1), description="rounds")
        ][1:]  # the first warms up

    result = {
        "provenance": Provenance.of_this_run().model_dump(),
        "unit": "output tokens per second, and their ratio leadout over stock",
        "ratios": {f"concurrency {c}": summary(rounds, c) for c in PROMPTS_AT},
        "rounds": rounds,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["ratios"], indent=2))


def start(target: str, drafter: Path) -> Any:
    from vllm import LLM

    count = read_checkpoint(drafter).config.max_draft_tokens
    return LLM(
        model=target,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        enable_prefix_caching=False,
        speculative_config={
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": count,
        },
    )


def drafter_class(engine: Any) -> str:
    (name,) = engine.collective_rpc(lambda worker: type(worker.get_draft_model()).__name__)
    return str(name)


def one_round(
    engines: dict[str, Any], turns: list[str], number: int
) -> dict[str, dict[int, float]]:
    """Tokens per second of each engine at each concurrency; who begins changes every round."""
    rates: Rates = {name: {} for name in engines}
    for concurrency, count in PROMPTS_AT.items():
        asked = [turns[(number * count + i) % len(turns)] for i in range(count)]
        for name in list(engines)[:: 1 if number % 2 else -1]:
            rates[name][concurrency] = tokens_per_second(engines[name], asked, concurrency)
    return rates


def tokens_per_second(engine: Any, asked: list[str], concurrency: int) -> float:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    started = time.perf_counter()
    for first in range(0, len(asked), concurrency):
        engine.generate(asked[first : first + concurrency], params, use_tqdm=False)
    return len(asked) * TOKENS / (time.perf_counter() - started)


def summary(rounds: list[Rates], concurrency: int) -> dict[str, float]:
    ratios = sorted(r["leadout"][concurrency] / r["stock"][concurrency] for r in rounds)
    lower, _, upper = statistics.quantiles(ratios, n=4)
    return {
        "median": statistics.median(ratios),
        "lower_quartile": lower,
        "upper_quartile": upper,
        "lowest": ratios[0],
        "highest": ratios[-1],
    }


if __name__ == "__main__":
    main()
