"""The table of fault classes: how many cases of each were run, and what was lost.

    python experiments/reliability_table.py --out results/reliability/faults.json

Gathers the results in the folder of `--out`. Each has a class of faults (name, cases, lost,
command), or a list of them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import ROOT, write_result

COLUMNS = ("name", "cases", "lost", "command")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    classes = [
        {column: each[column] for column in COLUMNS} | {"result": path.name}
        for path in sorted((ROOT / "results" / "reliability").glob("*.json"))
        if path.name != out.name
        for each in fault_classes(json.loads(path.read_text()))
    ]
    write_result(out, {"classes": classes})


def fault_classes(result: dict[str, Any]) -> list[dict[str, Any]]:
    found = result.get("classes", [result])
    return [each for each in found if all(column in each for column in COLUMNS)]


if __name__ == "__main__":
    main()
