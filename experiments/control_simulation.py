"""Compares the live draft-length policy with an oracle on synthetic traffic and machines.

    python experiments/control_simulation.py --out results/control/simulator.json

Every cell is a kind of traffic, a machine, a batch size, and what the policy knows about costs at
the start ("measured": the machine's curves; "nothing"). It holds the policy's tokens per second
relative to an oracle, which knows acceptance probabilities and costs but not the outcomes, and
relative to a bare engine. The policy's constants were chosen on a part of this traffic; "held out"
is the other part, and the seeds are none of those used for choosing. Also measured: how many steps
a wrong prior lasts.

`--recorded FILE` adds recorded traffic: a line of JSON per request, with the accepted counts of its
steps when all drafts were verified.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import provenance
from control_simulator.simulator import Machine, run_bare, run_oracle, run_policy
from control_simulator.traffic import (
    HELD_OUT_TRAFFIC,
    MACHINES,
    MAX_DRAFTS,
    TUNING_TRAFFIC,
    Traffic,
    level,
    recorded,
    steady,
)
from leadout.control.acceptance_model import AcceptanceCurve

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
BOUND = 0.97
FIRST_SEED = 1000
WRONG_PRIORS = {"hopeless, is good": (0.02, 0.9), "good, is hopeless": (0.9, 0.02)}
WINDOW = 50  # steps over which throughput is compared with the oracle after a wrong prior


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clock", type=float, default=1500.0, help="length of a run, bare steps")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--recorded", type=Path)
    arguments = parser.parse_args()
    traffic = [*TUNING_TRAFFIC, *HELD_OUT_TRAFFIC]
    if arguments.recorded is not None:
        lines = arguments.recorded.read_text().splitlines()
        traffic.append(recorded(arguments.recorded.stem, [json.loads(line) for line in lines]))
    cells = []
    for each in track(traffic, description="traffic"):
        for machine in MACHINES:
            for batch_size in BATCH_SIZES:
                cells += simulate(each, machine, batch_size, arguments.clock, arguments.seeds)
    result = {
        "provenance": provenance(),
        "clock": arguments.clock,
        "seeds": arguments.seeds,
        "bound": BOUND,
        "cells": cells,
        "chosen_on": summary([cell for cell in cells if not cell["held_out"]]),
        "held_out": summary([cell for cell in cells if cell["held_out"]]),
        "wrong_prior_steps": wrong_priors(),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


def simulate(
    traffic: Traffic, name: str, batch_size: int, clock: float, seeds: int
) -> list[dict[str, Any]]:
    """The cells with and without measured costs."""
    machine = Machine(MACHINES[name])
    oracle = run_oracle(traffic, machine, batch_size, clock).rate
    bare = run_bare(traffic, machine, batch_size, clock).rate
    found = []
    for start, known in (("measured", machine.costs), ("nothing", None)):
        rates = [
            run_policy(machine.policy(known), traffic, machine, batch_size, clock, seed).rate
            for seed in range(FIRST_SEED, FIRST_SEED + seeds)
        ]
        found.append(
            {
                "traffic": traffic.name,
                "adversary": traffic.is_adversary,
                "held_out": traffic not in TUNING_TRAFFIC,
                "machine": name,
                "batch": batch_size,
                "costs": start,
                "of_oracle": round(mean(rates) / oracle, 4),
                "of_oracle_each": [round(rate / oracle, 4) for rate in rates],
                "of_bare": round(mean(rates) / bare, 4),
                "oracle_of_bare": round(oracle / bare, 4),
            }
        )
    return found


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    fair = [cell for cell in cells if not cell["adversary"]]
    return {
        "cells": len(fair),
        "at_least_bound": sum(cell["of_oracle"] >= BOUND for cell in fair),
        "mean": round(mean(cell["of_oracle"] for cell in fair), 4),
        "worst": min(fair, key=lambda cell: cell["of_oracle"]),
        "below_bound": [
            [cell[key] for key in ("traffic", "machine", "batch", "costs", "of_oracle")]
            for cell in fair
            if cell["of_oracle"] < BOUND
        ],
        "worst_of_bare": min(cells, key=lambda cell: cell["of_bare"]),
    }


def wrong_priors() -> dict[str, dict[str, int]]:
    """The first step from which on the policy is near the oracle for a while."""
    found: dict[str, dict[str, int]] = {}
    for case, (prior_probability, true_probability) in WRONG_PRIORS.items():
        traffic = Traffic(case, steady(level(true_probability)))
        found[case] = {}
        for name in MACHINES:
            machine = Machine(MACHINES[name])
            for batch_size in BATCH_SIZES:
                prior = AcceptanceCurve.from_probabilities([prior_probability] * MAX_DRAFTS)
                policy = machine.policy(machine.costs, prior)
                run = run_policy(policy, traffic, machine, batch_size, 600.0)
                oracle = run_oracle(traffic, machine, batch_size, 100.0).rate
                found[case][f"{name}, batch {batch_size}"] = next(
                    start
                    for start in range(len(run.steps) - WINDOW)
                    if run.rate_between(start, start + WINDOW) >= BOUND * oracle
                )
    return found


def show(result: dict[str, Any]) -> None:
    console = Console()
    for name in MACHINES:
        table = Table(title=f"{name}: share of the oracle (costs measured / unknown at the start)")
        table.add_column("traffic")
        for batch_size in BATCH_SIZES:
            table.add_column(f"b={batch_size}", justify="right")
        by_traffic: dict[str, dict[tuple[int, str], float]] = {}
        for cell in result["cells"]:
            if cell["machine"] == name:
                row = by_traffic.setdefault(cell["traffic"], {})
                row[cell["batch"], cell["costs"]] = cell["of_oracle"]
        for traffic, row in by_traffic.items():
            shares = [f"{row[b, 'measured']:.3f} / {row[b, 'nothing']:.3f}" for b in BATCH_SIZES]
            table.add_row(traffic, *shares)
        console.print(table)
    console.print_json(data={name: result[name] for name in ("chosen_on", "held_out")})
    console.print_json(data=result["wrong_prior_steps"])


if __name__ == "__main__":
    main()
