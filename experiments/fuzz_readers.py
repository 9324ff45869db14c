"""Damaged inputs for every reader of files and replies: each is read, or refused by a typed error.

100,000 cases per reader, in processes with bounded memory; a slow reader has as many as fit into
`--seconds`. What each reader has done is kept in `--work`, and the same command at the same commit
goes on from there:

    python experiments/fuzz_readers.py --work WORK --out results/reliability/fuzz.json

`--only NAME` runs one reader and prints what was lost.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from common import provenance, write_result
from support.fuzzing import (
    CASES_PER_PROCESS,
    FAULTS,
    MAX_MESSAGE,
    MAX_MIB,
    MAX_SECONDS,
    Outcomes,
    Reader,
    run_bounded,
)
from support.readers import READERS

CASES = 100_000
FIRST = 1000  # cases of the first process, from which the speed follows
MEMORY = Path("/dev/shm")  # a disk would be slower than most readers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="result; without it, losses are printed only")
    parser.add_argument("--work", type=Path, help="folder with what was done before")
    parser.add_argument("--only", help="name of one reader")
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--seconds", type=float, default=120.0, help="for one reader")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [each for each in READERS if arguments.only in (None, each.name)]
    commit = str(provenance()["commit"])
    rows = []
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        for reader in chosen:
            row = earlier(arguments.work, reader, commit)
            if row is None or row["cases"] < arguments.cases:
                row = fuzz(reader, Path(name) / "case", arguments.cases, arguments.seconds, row)
                keep(arguments.work, row, commit)
            rows.append(row)
            print(f"{row['name']}: {row['cases']:,} cases, {row['lost']} lost", flush=True)
            for loss in row["losses"]:
                print(f"  case {loss['case']}, {loss['kind']}: {loss['problem']}")
    result = {
        "cases_per_reader": arguments.cases,
        "max_seconds": MAX_SECONDS,
        "max_mib": MAX_MIB,
        "max_message_characters": MAX_MESSAGE,
        "files_in_place_of_the_file": list(FAULTS),
        "cases": sum(row["cases"] for row in rows),
        "lost": sum(row["lost"] for row in rows),
        "readers_with_fewer_cases": [row["name"] for row in rows if row["cases"] < arguments.cases],
        "classes": rows,
    }
    if arguments.out is not None:
        write_result(arguments.out, result)
    sys.exit(1 if result["lost"] else 0)


def fuzz(
    reader: Reader, folder: Path, cases: int, seconds: float, before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run a reader until it had all cases, or the time is over; `before` was done already."""
    outcomes, spent_before = Outcomes(), 0.0
    if before is not None:
        outcomes = Outcomes(
            Counter(before["outcomes"]),
            before["losses"],
            before["slowest_seconds"],
            before["grown_mib"],
        )
        spent_before = before["seconds"]
    started = time.monotonic()
    first = done = outcomes.cases
    size = min(FIRST, cases - done)
    while size > 0:
        outcomes.add(run_bounded(reader, folder, done, done + size))
        done += size
        spent = time.monotonic() - started
        more = int((seconds - spent) * (done - first) / spent)
        size = min(cases - done, CASES_PER_PROCESS, more)
    return {
        "name": reader.name,
        "cases": outcomes.cases,
        "lost": outcomes.lost,
        "command": f"python experiments/fuzz_readers.py --only '{reader.name}'",
        "outcomes": dict(sorted(outcomes.counts.items())),
        "slowest_seconds": round(outcomes.slowest, 3),
        "grown_mib": round(outcomes.grown_mib, 1),
        "seconds": round(spent_before + time.monotonic() - started, 1),
        "losses": outcomes.losses,
    }


def earlier(work: Path | None, reader: Reader, commit: str) -> dict[str, Any] | None:
    """What this reader did in an earlier run of the same code."""
    path = _path(work, reader.name)
    if path is None or not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found["row"] if found["commit"] == commit else None


def keep(work: Path | None, row: dict[str, Any], commit: str) -> None:
    path = _path(work, row["name"])
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"commit": commit, "row": row}))


def _path(work: Path | None, name: str) -> Path | None:
    return None if work is None else work / f"{name.replace(': ', '-').replace(' ', '_')}.json"


if __name__ == "__main__":
    main()
