"""Eight writers on one registry, with failing system calls and kills: is there one order of it all?

    python experiments/registry_history.py --out results/reliability/registry_history.json

Writers read and move the pointer, roll versions back, publish, and add to the ledger. Now and then
a system call of one fails, or the writer is killed and started again. Each notes what it was
answered and when. A history is right if all operations can be put into one order that agrees with
these times and answers, if nothing that was confirmed is missing, and if nobody was told to serve a
version after it was marked as bad. The check: tests/support/registry_history.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.pool import Pool
from pathlib import Path

from common import write_result
from leadout.registry import Registry
from support.registry_faults import make_drafter
from support.registry_history import (
    Checked,
    check_history,
    make_registry,
    read_history,
    write_history,
)

COMMAND = "python experiments/registry_history.py --out results/reliability/registry_history.json"
WRITERS = 8
# Many short histories: a roll-back reads the manifests of all versions.
OPERATIONS_OF_ONE = 2000
MAX_SHOWN = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=60.0, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    histories = -(-arguments.operations // OPERATIONS_OF_ONE)
    every: list[Checked] = []
    kills = 0
    with tempfile.TemporaryDirectory() as name:
        drafter = make_drafter(Path(name) / "drafter")
        with multiprocessing.get_context("fork").Pool(WRITERS) as pool:
            for number in range(histories):
                if time.monotonic() > end:
                    break
                folder = Path(name) / str(number)
                checked, killed = history(pool, folder, drafter, arguments.seed + number)
                every.append(checked)
                kills += killed
                print(f"{number + 1} of {histories}: {checked.problems[:1]}", flush=True)
        shown = [p.replace(name, "") for each in every for p in each.problems][:MAX_SHOWN]
    answers: Counter[str] = Counter()
    for each in every:
        answers.update(each.by_answer)
    lost, served = (
        sum(getattr(each, field) for each in every) for field in ("lost_updates", "marked_served")
    )
    result = {
        "name": f"Registry: {WRITERS} writers, with failing system calls and kills",
        "cases": sum(each.operations for each in every),
        "lost": lost + served,
        "command": COMMAND,
        "lost_updates": lost,
        "servings_of_marked_versions": served,
        "writers": WRITERS,
        "histories": len(every),
        "kills": kills,
        "answers": dict(sorted(answers.items())),
        "problems": shown,
    }
    write_result(arguments.out, result)
    sys.exit(bool(lost + served or shown))


def history(pool: Pool, folder: Path, drafter: Path, seed: int) -> tuple[Checked, int]:
    registry = folder / "registry"
    make_registry(registry, drafter)
    logs = [folder / f"{writer}.log" for writer in range(WRITERS)]
    each = OPERATIONS_OF_ONE // WRITERS
    kills = pool.starmap(
        write_history,
        [(registry, drafter, log, writer, each, seed) for writer, log in enumerate(logs)],
        chunksize=1,
    )
    done = [one for log in logs for one in read_history(log)]
    return check_history(Registry(registry), done), sum(kills)


if __name__ == "__main__":
    main()
