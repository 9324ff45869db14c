"""Who decides on a roll-back: hostile requests, versions below their promise, changing traffic.

    python experiments/rollback_adversary.py results/learn/gate_noise.json \
        --out results/reliability/adversary.json

See `control_simulator/rollback_fleet.py`. Every server is restarted once at a random time, and
loses what it had counted since its last record. Most scenes have a tenth of hostile requests; a
bound is given for those that must keep one, and the others show the limits of the method.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from common import STARTED, write_result
from control_simulator.rollback_fleet import Hostile, Population, Scene, is_removed
from leadout.provenance import Provenance

RUNS = 100
SERVERS = (1, 2, 4)
MAX_WRONG = 0.01  # share of the runs; with fewer than 100 of a kind, one of them
SHORT = 0.1  # a version below its promise

NONE = Hostile(share=0.0)
STRATEGIES = {
    "none": NONE,
    "acceptance 1.0": Hostile(),
    "just not left out": Hostile(length="just kept"),
    "bursts, the first right after the swap": Hostile(in_bursts=True),
    "bursts just not left out": Hostile(in_bursts=True, length="just kept"),
    "one client": Hostile(clients="one"),
    "addresses of ordinary clients": Hostile(clients="known"),
    "one prompt": Hostile(one_prompt=True),
    "on the new version only": Hostile(before=False),
    "on the new version only, just not left out": Hostile(before=False, length="just kept"),
    "one client with 40% of the requests": Hostile(share=0.4, clients="one", before=False),
    "one prompt with 40% of the requests": Hostile(share=0.4, one_prompt=True, before=False),
}
MOST_HARMFUL = (
    "none",
    "acceptance 1.0",
    "on the new version only, just not left out",
    "bursts just not left out",
)
# Beyond what is promised: they show where it ends.
BEYOND = {
    "20% of the requests from many clients": Hostile(share=0.2, before=False),
}
SHIELDS = {
    "on the version before only, just not left out": Hostile(length="just kept", now=False),
    "acceptance 8.0 on the new version": Hostile(length="highest", before=False),
}
HARDER = 0.15


@dataclass(frozen=True)
class Case:
    name: str
    scene: Scene
    is_bound: bool = True


def cases() -> list[Case]:
    found = []
    for servers in SERVERS:
        # One server is the hardest case: nobody has to agree with it.
        good = STRATEGIES if servers == 1 else {name: STRATEGIES[name] for name in MOST_HARMFUL}
        bad = {name: STRATEGIES[name] for name in MOST_HARMFUL}
        found += [Case(name, Scene(0.0, each, servers)) for name, each in good.items()]
        found += [Case(name, Scene(SHORT, each, servers)) for name, each in bad.items()]
        for below in (0.0, SHORT):
            name = "none; traffic is harder since it was captured"
            scene = Scene(below, NONE, servers, harder_since_capture=HARDER)
            found.append(Case(name, scene, is_bound=not below))
            name = "none; traffic is harder since the swap"
            scene = Scene(below, NONE, servers, harder_since_swap=HARDER)
            found.append(Case(name, scene, is_bound=not below and servers > 1))
        found += [Case(name, Scene(0.0, each, servers), False) for name, each in BEYOND.items()]
        found += [Case(name, Scene(SHORT, each, servers), False) for name, each in SHIELDS.items()]
    return found


def outcome(cells: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Over all kinds of traffic together, and in the kinds with the most and fewest removals."""
    found = list(cells)
    shares = [cell["removed"] / cell["runs"] for cell in found]
    runs, removed = (sum(cell[name] for cell in found) for name in ("runs", "removed"))
    return {
        "runs": runs,
        "removed": removed,
        "share": removed / runs,
        "lowest": min(shares),
        "highest": max(shares),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("noise", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=RUNS)
    arguments = parser.parse_args()
    measured = json.loads(arguments.noise.read_text())
    cells = []
    for traffic in ("base", "traffic"):
        population = Population.read(measured[traffic])
        for case in track(cases(), traffic):
            draw = np.random.default_rng(zlib.crc32(f"{traffic} {case}".encode()))
            removed = sum(is_removed(population, case.scene, draw) for _ in range(arguments.runs))
            wrong = arguments.runs - removed if case.scene.below else removed
            cells.append(
                {
                    "requests": traffic,
                    "spread": round(population.spread, 3),
                    "hostile": case.name,
                    "servers": case.scene.servers,
                    "below_promise": case.scene.below,
                    "runs": arguments.runs,
                    "removed": removed,
                    "is_bound": case.is_bound,
                    "is_kept": wrong <= max(MAX_WRONG * arguments.runs, 1),
                }
            )
    bound = [cell for cell in cells if cell["is_bound"]]
    write_result(
        arguments.out,
        {
            "name": "hostile traffic while a version is compared",
            "cases": sum(cell["runs"] for cell in bound),
            "lost": sum(not cell["is_kept"] for cell in bound),  # scenes that miss their bound
            "command": Provenance.of_this_run({}, STARTED).command,
            "good": outcome(cell for cell in bound if not cell["below_promise"]),
            "below_promise": outcome(cell for cell in bound if cell["below_promise"]),
            "cells": cells,
        },
    )


if __name__ == "__main__":
    main()
