"""What live control costs with a useless drafter: throughput over that of bare vLLM.

    python experiments/live_useless.py TARGET PROMPTS.jsonl WORK_FOLDER

The drafter has the shape of the shipped one and random weights, so that no draft is accepted, and
live control starts without a tuned file: once as served, and once without prompt lookup, which
gains something on some texts. Bare vLLM runs twice; a ratio is live control over the mean of both
within a round. Servers take turns in slices of a second: live control learns from no step in which
it was stopped, and at 16 requests a shorter slice has few others. Takes twenty minutes on two idle
cores. Writes `results/live/useless.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import common
from leadout.bench.setup import Arm, arm_command, common_flags
from leadout.bench.turns import in_slices, warm_up
from leadout.checkpoints import read_checkpoint, write_checkpoint
from leadout.console import Progress
from leadout.dflash.drafter import Drafter
from leadout.engine.load_test import LoadRequest, LoadResult
from leadout.engine.server_turns import started
from leadout.stats import paired_ratio

OUT = common.ROOT / "results" / "live" / "useless.json"
CONCURRENCIES = (1, 4, 8, 16)
ROUNDS, SECONDS, SLICE_SECONDS = 10, 4.0, 1.0
OUTPUT_TOKENS = 128
DTYPE = "float32"
LIVE, WITHOUT_LOOKUP = "live", "live-without-lookup"
NO_LOOKUP = {"leadout": {"live": {"prompt_lookup_min_match": 0}}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "prompts", "work"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    drafter = arguments.work / "random-drafter"
    if not drafter.exists():
        write_random_drafter(drafter)
    rounds = asyncio.run(measure(arguments, drafter))
    result = {
        "turns": "slices",
        "slice_seconds": SLICE_SECONDS,
        "rounds": ROUNDS,
        "seconds": SECONDS,
        "output_tokens": OUTPUT_TOKENS,
        "dtype": DTYPE,
        "prompts": arguments.prompts.stem,
        "cells": [cell(concurrency, found) for concurrency, found in rounds.items()],
    }
    common.write_result(OUT, result, target=arguments.target, random_drafter=drafter)


def write_random_drafter(folder: Path) -> None:
    config = read_checkpoint(common.SHIPPED).config
    torch.manual_seed(0)
    write_checkpoint(folder, Drafter(config).state_dict(), config, "zlab")


async def measure(arguments: Any, drafter: Path) -> dict[int, list[dict[str, LoadResult]]]:
    """The rounds of each concurrency, by arm."""
    arms = [
        Arm(name="bare", kind="bare"),
        Arm(name="bare-again", kind="bare"),
        Arm(name=LIVE, kind="live", drafter=str(drafter)),
        Arm(name=WITHOUT_LOOKUP, kind="live", drafter=str(drafter)),
    ]
    flags = common_flags(CONCURRENCIES, on_cpu=True, servers=len(arms))
    flags += ["--dtype", DTYPE, "--max-model-len", "2048"]
    launches = [arm_command(arm, str(arguments.target), flags) for arm in arms]
    launches[-1].command.extend(["--additional-config", json.dumps(NO_LOOKUP)])
    prompts = tuple(json.loads(line)["turns"][0] for line in arguments.prompts.open())
    found = {}
    with Progress("useless drafter") as progress:
        async with started(launches, flags, arguments.work, progress) as servers:
            most = load(prompts, max(CONCURRENCIES))
            await warm_up(servers, most, progress)
            advance = progress.stage("measure", len(CONCURRENCIES) * ROUNDS)
            for concurrency in CONCURRENCIES:
                found[concurrency] = []
                order = random.Random(concurrency)
                request = load(prompts, concurrency)
                async for each in in_slices(
                    servers, request, SECONDS, order, ROUNDS, slice_seconds=SLICE_SECONDS
                ):
                    found[concurrency].append(each)
                    advance(note=f"{concurrency} requests")
    return found


def load(prompts: tuple[str, ...], concurrency: int) -> LoadRequest:
    return LoadRequest(prompts=prompts, concurrency=concurrency, output_tokens=OUTPUT_TOKENS)


def cell(concurrency: int, rounds: list[dict[str, LoadResult]]) -> dict[str, Any]:
    speeds = [{name: each.tokens_per_second for name, each in found.items()} for found in rounds]
    costs = [
        {name: each.processor_seconds_per_token for name, each in found.items()} for found in rounds
    ]
    live, without = (
        paired_ratio([[each[name] / bare(each) for each in speeds]])
        for name in (LIVE, WITHOUT_LOOKUP)
    )
    again = paired_ratio([[each["bare-again"] / each["bare"] for each in speeds]])
    processor = paired_ratio([[bare(each) / each[LIVE] for each in costs]])
    drafting = [found[LIVE].drafting for found in rounds]
    return {
        "concurrency": concurrency,
        "ratio": live.value,
        "low": live.low,
        "high": live.high,
        "without_prompt_lookup": without.value,
        "without_prompt_lookup_low": without.low,
        "without_prompt_lookup_high": without.high,
        "by_processor_seconds": processor.value,
        "bare_against_bare": again.value,
        "bare_against_bare_low": again.low,
        "bare_against_bare_high": again.high,
        "drafting": [None if each is None else each.model_dump() for each in drafting],
        "tokens_per_second": speeds,
    }


def bare(values: dict[str, float]) -> float:
    return fmean((values["bare"], values["bare-again"]))


if __name__ == "__main__":
    main()
