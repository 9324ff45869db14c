"""Every system call of every operation of a registry fails in turn: is anything lost?

    python experiments/registry_faults.py --out results/reliability/registry_faults.json

Errors are EIO, ESTALE and ENOSPC, a `close` that fails (and closes nevertheless), and writes that
are cut short; each for one call, and for all calls from there on. Afterwards the operation has
happened, or an error was reported; the registry is complete, and trying again helps. The operations
and what is checked: tests/support/registry_faults.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from common import write_result
from support.registry_faults import fail_each_call, make_drafter

COMMAND = "python experiments/registry_faults.py --out results/reliability/registry_faults.json"
MAX_SHOWN = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = fail_each_call(make_drafter(folder / "drafter"), folder / "registry")
        shown = [problem.replace(name, "") for problem in found.problems[:MAX_SHOWN]]
    result = {
        "name": "Registry: system calls that fail",
        "cases": found.cases,
        "lost": len(found.problems),
        "command": COMMAND,
        "by_call": found.by_call,
        "by_error": found.by_error,
        "problems": shown,
    }
    write_result(arguments.out, result)
    sys.exit(bool(found.problems))


if __name__ == "__main__":
    main()
