"""The cost of capturing every request: throughput with and without it, and with a failing disk.

One engine answers the same prompts repeatedly. Capture is switched on and off between turns, so
that nothing else differs. The failing disk is simulated by a file with the name of the capture
folder: every write raises an OSError, as on a full disk. Each ratio is taken within one round.
Rounds differ by more than the cost of capture, so its CPU time is measured too: in the scheduler
when a request ends, and in the capture thread, both as shares of the elapsed time.

    python experiments/learn_capture.py TARGET DRAFTER PROMPTS --out results/learn/capture.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from copy import copy
from pathlib import Path
from threading import Thread
from typing import Any

from rich.progress import track

from common import provenance, tokens_per_second
from leadout.engine.capture_store import segment_paths
from leadout.engine.settings import CAPTURE, SCHEDULER, CaptureSettings, with_section
from leadout.shards import read_shard
from leadout.stats import paired_ratio

ARMS = ("none", "capture", "refusing disk")
REQUESTS = 16  # at a time
WARM_UP = 2  # rounds
TOKENS = 48
DTYPE = "float32"  # not every CPU computes in bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    turns = [json.loads(line)["turns"][0] for line in arguments.prompts.open()]
    with tempfile.TemporaryDirectory() as folder:
        llm = start(arguments.target, arguments.drafter, Path(folder))
        from leadout.engine.capture import make_capture  # imports vLLM

        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        captures = {
            "none": None,
            "capture": scheduler._capture,
            "refusing disk": make_capture(config_with(llm, Path(__file__) / "capture")),
        }
        rates: list[dict[str, float]] = []
        ends = RequestEndTimer(scheduler)
        for number in track(range(arguments.rounds + WARM_UP), description="rounds"):
            if number == WARM_UP:
                ends.seconds.clear()
            prompts = [turns[(number * REQUESTS + place) % len(turns)] for place in range(REQUESTS)]
            first = number % len(ARMS)
            row = {}
            for arm in (*ARMS[first:], *ARMS[:first]):
                scheduler._capture = captures[arm]
                ends.arm = arm
                row[arm] = tokens_per_second(llm, prompts, TOKENS)
                time.sleep(0.1)  # the writer ends with its own turn
            rates.append(row)
        rates = rates[WARM_UP:]
        numbers, shares = {}, {}
        for arm in ARMS[1:]:
            time_of_arm = sum(REQUESTS * TOKENS / row[arm] for row in rates)
            shares[arm] = {
                "at the end of a request": (ends.seconds[arm] - ends.seconds["none"]) / time_of_arm,
                "in its thread": processor_seconds(captures[arm]._thread) / time_of_arm,
            }
            captures[arm].close()
            numbers[arm] = captures[arm].counters.model_dump()
        written = sum(1 for path in segment_paths(Path(folder)) for _ in read_shard(path))
    result = {
        "provenance": provenance(target=arguments.target, drafter=arguments.drafter),
        "unit": "output tokens per second, and their ratio to those without capture",
        "requests_at_a_time": REQUESTS,
        "tokens_each": TOKENS,
        "dtype": DTYPE,
        "ratio": {
            arm: paired_ratio([[row[arm] / row["none"] for row in rates]]).model_dump()
            for arm in ARMS[1:]
        },
        "share_of_the_time": shares,
        "numbers": numbers,
        "samples_on_disk": written,
        "rounds": rates,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["ratio"], indent=1), shares, numbers, written)


class RequestEndTimer:
    """Seconds that the scheduler spends on ending requests, by arm."""

    def __init__(self, scheduler: Any) -> None:
        self.arm = ARMS[0]
        self.seconds: Counter[str] = Counter()
        let_go = scheduler._free_request

        def timed(*arguments: Any, **settings: Any) -> Any:
            began = time.perf_counter()
            try:
                return let_go(*arguments, **settings)
            finally:
                self.seconds[self.arm] += time.perf_counter() - began

        scheduler._free_request = timed


def processor_seconds(thread: Thread) -> float:
    """CPU seconds of the thread since its start, warm-up rounds included."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def start(target: str, drafter: Path, folder: Path) -> Any:
    from vllm import LLM

    from leadout.checkpoints import read_checkpoint

    settings = CaptureSettings(folder=folder)
    count = read_checkpoint(drafter).config.max_draft_tokens
    return LLM(
        model=target,
        dtype=DTYPE,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=REQUESTS,
        enable_prefix_caching=False,  # all turns of a round have the same prompts
        scheduler_cls=SCHEDULER,
        additional_config=with_section({}, CAPTURE, settings),
        speculative_config={
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": count,
        },
    )


def config_with(llm: Any, folder: Path) -> Any:
    """The engine's own settings with another capture folder."""
    config = copy(llm.llm_engine.vllm_config)
    config.additional_config = with_section({}, CAPTURE, CaptureSettings(folder=folder))
    config.instance_id = f"{config.instance_id}-refusing"
    return config


if __name__ == "__main__":
    main()
