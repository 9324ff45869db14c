"""A thousand kills of a registry's writer, a capture, servers that swap, or a learner.

    python experiments/reliability_kills.py registry --out results/reliability/kills_registry.json

and so for capture, swap and learner. A process is killed (SIGKILL) at a system call on files that
is drawn at random from all that change something; a write may arrive in part. Then it is started
again, and often killed again. After each kill, and after it has finished at last, everything that
it had said was done must be there, once. The processes and what is checked:
tests/support/kill_scenarios.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from common import write_result
from support.kill_scenarios import SCENARIOS, make_scenario
from support.kills import kill_at_random

NAMES = {
    "registry": "Writer of a registry killed",
    "capture": "Capturing server killed",
    "swap": "Servers killed while they swap and roll back",
    "learner": "Learner killed",
}
MAX_SHOWN = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("process", choices=SCENARIOS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=30.0, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    name: str = arguments.process
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work).resolve()
        scenario, started = make_scenario(name, folder / "made"), time.monotonic()
        found = kill_at_random(
            scenario, folder / "case", arguments.seed, arguments.kills, 60 * arguments.minutes
        )
        shown = [problem.replace(str(folder), "") for problem in found.problems[:MAX_SHOWN]]
    result = {
        "name": NAMES[name],
        "cases": found.kills,
        "lost": len(found.problems),
        "command": f"python experiments/reliability_kills.py {name} "
        f"--out results/reliability/kills_{name}.json",
        "seed": arguments.seed,
        "restarts": found.restarts,
        "system_calls": sorted(found.calls),
        "seconds": round(time.monotonic() - started),
        "problems": shown,
    }
    write_result(arguments.out, result)
    sys.exit(bool(found.problems))


if __name__ == "__main__":
    main()
