"""What each mechanism of the live policy is worth: the simulator without it, one at a time.

    python experiments/live_ablation.py --out results/live/ablation.json --seconds 100

A variant is the policy with one mechanism removed or one constant neutral. Its cost is the loss of
tokens per second against the whole policy, averaged over machines and batch sizes, for the kind of
traffic that loses most; a mechanism pays if that is 1% or more. The whole policy with other noise
shows how large such a difference is by chance. Repeat the command until it says that the file is
complete: each call simulates for about `--seconds` and adds to the file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from common import provenance
from control_simulator.simulator import Machine, run_policy
from control_simulator.traffic import HELD_OUT_TRAFFIC, MACHINES, TUNING_TRAFFIC
from leadout.control import acceptance_model, cost_model, policy

BOUND = 0.01
CLOCK = 700.0  # bare steps
SEED = 2000
MACHINE_NAMES = ("cpu", "graphs")
BATCHES = {2: "measured", 12: "nothing"}  # what is known about costs at the start
TRAFFIC = (
    "steady, hopeless",
    "steady 0.8",
    "weak first, strong rest",
    "collapse after 2",
    "fast drift",
    "two kinds, half each",
    "switch every 300",
    "requests that switch to translation",
    "short requests of two kinds",
    "prefill in every step",
    "half speed from 300 on",
)
WHOLE = "the whole policy"
CHANCE = "the whole policy, other noise"
# What is replaced in which module or class.
Change = tuple[Any, str, Any]
VARIANTS: dict[str, list[Change]] = {
    WHOLE: [],
    CHANCE: [],
    "no probes": [(policy.ProbeScheduler, "due", lambda self, costs, max_drafts: 0)],
    "no second probe after a success": [
        (policy.ProbeScheduler, "observe", lambda self, accepted, trials, costs: None)
    ],
    "no survey of costs": [(policy.CostSurvey, "requested_k", lambda self, batch_size: None)],
    "no costs from steps with prefill": [],  # in `_without`
    "no steps of different lengths": [],  # in `_without`
    "no groups of requests": [(acceptance_model, "GROUPS", 1), (policy, "GROUPS", 1)],
    "no forgetting of scores": [(acceptance_model, "SCORE_HALF_LIFE", 1e9)],
    "no mean of all traffic in scores": [(acceptance_model, "SCORE_PRIOR_STEPS", 0.01)],
    "no prior of a group": [(acceptance_model, "GROUP_PRIOR_TRIALS", 0.01)],
    "no shrinkage between positions": [(acceptance_model, "POSITION_PRIOR_TRIALS", 0.01)],
    "no forgetting of trials": [(acceptance_model, "HALF_LIFE", 1e9)],
    "no refinement of costs": [(cost_model, "OBSERVATION_NOISE", 1e6)],
    "no knees": [(cost_model, "KNEE_TOKENS", (10**9, 10**9))],
    "no jumps between rungs": [(cost_model, "JUMP_STD", 1e-9)],
    "no outlier gate": [(cost_model, "OUTLIER_SIGMAS", 1e9)],
    "no reset after outliers": [(cost_model, "OUTLIERS_BEFORE_RESET", 10**9)],
    "no process noise": [(cost_model, "PROCESS_NOISE_STEPS", 1e15)],
    "no prior cost of drafting": [(cost_model, "PRIOR_DRAFTING", 0.0)],
    "no prior cost of leaving the graphs": [(cost_model, "PRIOR_MIXED", 0.0)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100.0)
    arguments = parser.parse_args()
    started = time.monotonic()
    rates: dict[str, dict[str, float]] = {}
    if arguments.out.exists():
        before = json.loads(arguments.out.read_text())
        if before["complete"]:
            raise SystemExit(f"{arguments.out} is complete; remove it to simulate again")
        rates = before["tokens_per_second"]
    for name in VARIANTS:
        if name in rates:
            continue
        if time.monotonic() - started > arguments.seconds:
            break
        with _without(name):
            rates[name] = simulate(SEED + (name == CHANCE))
    rows = {name: compare(rates[name], rates[WHOLE]) for name in rates if name != WHOLE}
    result = {
        "provenance": provenance(),
        "bound": BOUND,
        "clock": CLOCK,
        "batches": BATCHES,
        "complete": len(rates) == len(VARIANTS),
        "variants": rows,
        "tokens_per_second": rates,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    table = Table("variant", "mean cost", "highest cost", "in traffic")
    for name, row in rows.items():
        shown = (f"{100 * row[key]:.1f}%" for key in ("mean_cost", "cost"))
        table.add_row(name, *shown, row["traffic"])
    Console(width=140).print(table)
    print("complete" if result["complete"] else "not complete: run the same command again")


def simulate(seed: int) -> dict[str, float]:
    """Tokens per second of each cell."""
    traffic = {each.name: each for each in (*TUNING_TRAFFIC, *HELD_OUT_TRAFFIC)}
    found = {}
    for name in TRAFFIC:
        for machine_name in MACHINE_NAMES:
            machine = Machine(MACHINES[machine_name])
            for batch, start in BATCHES.items():
                live = machine.policy(machine.costs if start == "measured" else None)
                run = run_policy(live, traffic[name], machine, batch, CLOCK, seed)
                found[f"{name}/{machine_name}/{batch}"] = round(run.rate, 3)
    return found


def compare(rates: dict[str, float], whole: dict[str, float]) -> dict[str, Any]:
    """The cost of a removal, by kind of traffic."""
    by_traffic = defaultdict(list)
    for cell, rate in rates.items():
        by_traffic[cell.split("/")[0]].append(1 - rate / whole[cell])
    costs = {name: mean(each) for name, each in by_traffic.items()}
    worst = max(costs, key=costs.__getitem__)
    return {
        "cost": round(costs[worst], 4),
        "traffic": worst,
        "mean_cost": round(mean(costs.values()), 4),
        "pays": costs[worst] >= BOUND,
    }


@contextmanager
def _without(name: str) -> Iterator[None]:
    changes = list(VARIANTS[name])
    if name == "no costs from steps with prefill":
        observe = policy.Policy.observe

        def ignore(
            self: Any, outcomes: Any, k: int, seconds: float | None, prefill: int = 0
        ) -> None:
            observe(self, outcomes, k, None if prefill else seconds, prefill)

        changes.append((policy.Policy, "observe", ignore))
    if name == "no steps of different lengths":
        best = policy.optimise

        def uniform(survival: Any, counts: Any, lowest_limit: int, costs: Any) -> Any:
            costs.mixed = costs.mixed + 1e6
            return best(survival, counts, lowest_limit, costs)

        changes.append((policy, "optimise", uniform))
    patches = [patch.object(*change) for change in changes]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


if __name__ == "__main__":
    main()
