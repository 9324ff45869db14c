"""The live draft-length policy on made-up traffic and machines, against an oracle.

    python experiments/control_simulation.py --out results/control/simulator.json

Every cell: a kind of traffic, a machine, a batch size, and what the policy knows of costs at the
start ("measured": the machine's curves; "nothing"). Told are its tokens per second over those of an
oracle that knows the laws of traffic and the true costs but no coin flip, and over a bare engine.
The constants of the policy were chosen on a part of this traffic; "held out" is the other part, and
the seeds are none of those used for choosing. Besides: how many steps a wrong belief about the
traffic lasts, and what a decision takes.

`--recorded FILE` adds traffic from a record: a line of JSON per request, the accepted counts of its
steps with all drafts verified.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from control_simulator.simulator import Machine, run_bare, run_oracle, run_policy
from control_simulator.traffic import (
    HELD_OUT,
    MACHINES,
    MOST,
    PROCESSES,
    Process,
    level,
    recorded,
    steady,
)
from leadout.control.acceptance_model import AcceptanceCurve, Outcome
from leadout.control.policy import Policy, Seat
from leadout.provenance import Provenance

BATCHES = (1, 2, 4, 8, 16, 32)
BOUND = 0.97
FIRST_SEED = 1000
WRONG_PRIORS = {"hopeless, is good": (0.02, 0.9), "good, is hopeless": (0.9, 0.02)}
WINDOW = 50  # steps over which "as fast as the oracle" is judged after a wrong prior


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clock", type=float, default=1500.0, help="length of a run, bare steps")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--recorded", type=Path)
    arguments = parser.parse_args()
    processes = [*PROCESSES, *HELD_OUT]
    if arguments.recorded is not None:
        lines = arguments.recorded.read_text().splitlines()
        processes.append(recorded(arguments.recorded.stem, [json.loads(line) for line in lines]))
    cells = []
    for process in track(processes, description="traffic"):
        for name in MACHINES:
            for batch in BATCHES:
                cells += cells_of(process, name, batch, arguments.clock, arguments.seeds)
    result = {
        "provenance": Provenance.of_this_run().model_dump(),
        "clock": arguments.clock,
        "seeds": arguments.seeds,
        "bound": BOUND,
        "cells": cells,
        "chosen_on": summary([cell for cell in cells if not cell["held_out"]]),
        "held_out": summary([cell for cell in cells if cell["held_out"]]),
        "wrong_prior_steps": wrong_priors(),
        "decision_microseconds": decision_times(),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


def cells_of(
    process: Process, name: str, batch: int, clock: float, seeds: int
) -> list[dict[str, Any]]:
    costs = MACHINES[name]()
    machine = Machine(costs)
    oracle = run_oracle(process, machine, batch, clock).rate
    bare = run_bare(process, machine, batch, clock).rate
    found = []
    for start, known in (("measured", costs), ("nothing", None)):
        rates = [
            run_policy(Policy(MOST, known), process, machine, batch, clock, seed).rate
            for seed in range(FIRST_SEED, FIRST_SEED + seeds)
        ]
        found.append(
            {
                "traffic": process.name,
                "adversary": process.watches,
                "held_out": process not in PROCESSES,
                "machine": name,
                "batch": batch,
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
    for told, (believed, true) in WRONG_PRIORS.items():
        process = Process(told, steady(level(true)))
        found[told] = {}
        for name in MACHINES:
            costs = MACHINES[name]()
            machine = Machine(costs)
            for batch in BATCHES:
                prior = AcceptanceCurve.of_odds([believed] * MOST)
                run = run_policy(Policy(MOST, costs, prior), process, machine, batch, 600.0)
                oracle = run_oracle(process, machine, batch, 100.0).rate
                found[told][f"{name}, batch {batch}"] = next(
                    start
                    for start in range(len(run.course) - WINDOW)
                    if run.rate_of_steps(start, start + WINDOW) >= BOUND * oracle
                )
    return found


def decision_times() -> dict[str, dict[str, float]]:
    """Median and 99th percentile of deciding and of learning from a step."""
    found = {}
    for batch in (1, 8, 64):
        policy, draws = Policy(MOST, MACHINES["cpu"]()), random.Random(0)
        drafted, decide, observe = 0, [], []
        for _ in range(2000):
            seats = [Seat(str(number), drafted, MOST) for number in range(batch)]
            start = time.perf_counter()
            decision = policy.decide(seats)
            decide.append(time.perf_counter() - start)
            outcomes = [
                Outcome(seat.request, tried, draws.randint(0, tried))
                for seat, tried in zip(seats, decision.verify, strict=True)
            ]
            start = time.perf_counter()
            policy.observe(outcomes, decision.draft, 0.05)
            observe.append(time.perf_counter() - start)
            drafted = decision.draft
        found[str(batch)] = {
            "decide_median": round(1e6 * median(decide), 1),
            "decide_p99": round(1e6 * sorted(decide)[1980], 1),
            "observe_median": round(1e6 * median(observe), 1),
            "observe_p99": round(1e6 * sorted(observe)[1980], 1),
        }
    return found


def show(result: dict[str, Any]) -> None:
    console = Console()
    for name in MACHINES:
        table = Table(title=f"{name}: share of the oracle (costs measured / unknown at the start)")
        table.add_column("traffic")
        for batch in BATCHES:
            table.add_column(f"b={batch}", justify="right")
        by_traffic: dict[str, dict[tuple[int, str], float]] = {}
        for cell in result["cells"]:
            if cell["machine"] == name:
                row = by_traffic.setdefault(cell["traffic"], {})
                row[cell["batch"], cell["costs"]] = cell["of_oracle"]
        for traffic, row in by_traffic.items():
            shares = [f"{row[b, 'measured']:.3f} / {row[b, 'nothing']:.3f}" for b in BATCHES]
            table.add_row(traffic, *shares)
        console.print(table)
    console.print_json(data={name: result[name] for name in ("chosen_on", "held_out")})
    console.print_json(data=result["wrong_prior_steps"])
    console.print_json(data=result["decision_microseconds"])


if __name__ == "__main__":
    main()
