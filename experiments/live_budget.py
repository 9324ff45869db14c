"""How long live control keeps the scheduler from the next step, by number of requests.

    python experiments/live_budget.py --out results/live/budget.json

Milliseconds of `LiveControl.plan` and `LiveControl.step_done` together, at the 50th and 99th
percentile of all steps, as a GPU server runs them: K of up to 15 from a ladder of captured graphs,
placeholders instead of drafts, requests that come and go. Two kinds of traffic: one in which all
steps stay in the graphs, and one without graphs, in which requests verify different numbers.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import write_result
from leadout.control.policy import Policy, ladder_up_to
from leadout.engine.live import LiveControl, StepReport

REQUESTS = (1, 16, 64, 256)
MAX_DRAFTS = 15
BOUND = 0.3  # milliseconds at 256 requests, 99th percentile
WARM_UP = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4000)
    arguments = parser.parse_args()
    cells = []
    for count in REQUESTS:
        for kind in ("graphs", "no graphs"):
            spent = sorted(milliseconds(count, arguments.steps, has_graphs=kind == "graphs"))
            cells.append(
                {
                    "requests": count,
                    "kind": kind,
                    "p50": round(spent[len(spent) // 2], 4),
                    "p99": round(spent[int(0.99 * len(spent))], 4),
                }
            )
    largest = max(cell["p99"] for cell in cells if cell["requests"] == max(REQUESTS))
    result = {"bound": BOUND, "steps": arguments.steps, "cells": cells, "largest_p99": largest}
    write_result(arguments.out, result)


def milliseconds(count: int, steps: int, *, has_graphs: bool) -> list[float]:
    """Of each step after the first ones; time in which this process did not run is excluded."""
    rng = random.Random(count)
    ladder = ladder_up_to(MAX_DRAFTS)
    policy = Policy(MAX_DRAFTS, ladder=ladder, has_graphs=has_graphs)
    quality = [0.9 if number % 2 else 0.3 for number in range(count)]
    accepted = [_run(rng, quality[number % count]) for number in range(8192)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        control = LiveControl(policy, MAX_DRAFTS, Path(folder) / "live.json", lambda line: None)
        requests = [_request(number) for number in range(count)]
        for step_number in range(WARM_UP + steps):
            if step_number % 7 == 0:  # one leaves, another comes
                slot = rng.randrange(count)
                control.forget(requests[slot].request_id)
                requests[slot] = _request(count + step_number)
            started = time.thread_time()
            step, changed = control.plan(requests)
            for request, tokens, _ in changed:
                request.spec_token_ids = tokens
            planned = time.thread_time()
            drafted = step.decision.draft
            verified = {each.request_id: len(each.spec_token_ids) for each in requests}
            sampled = {
                name: 1 + min(n, accepted[(step_number * count + slot) % 8192])
                for slot, (name, n) in enumerate(verified.items())
            }
            scheduled = {name: 1 + n for name, n in verified.items()}
            report = StepReport(scheduled, verified, sampled, drafted)
            ended = time.thread_time()
            control.step_done(step, report)
            done = time.thread_time()
            if step_number >= WARM_UP:
                found.append(1e3 * (planned - started + done - ended))
            placeholders = [-1] * drafted
            for each in requests:
                each.spec_token_ids = placeholders
    return found


def _request(number: int) -> Any:
    return SimpleNamespace(
        request_id=f"cmpl-{number:032x}",
        spec_token_ids=[],
        sampling_params=SimpleNamespace(extra_args=None),
    )


def _run(rng: random.Random, probability: float) -> int:
    length = 0
    while length < MAX_DRAFTS and rng.random() < probability:
        length += 1
    return length


if __name__ == "__main__":
    main()
