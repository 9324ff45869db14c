"""Searches everything that learning cycles leave behind for what users wrote.

    python experiments/privacy_marker.py [--rounds N] [--out FILE]

Markers are planted in prompts and answers of captured traffic. Real `leadout learn` commands then
end in every way: a version is published, a candidate is rejected, there is too little traffic, the
process is killed with SIGKILL, or interrupted. After each, all files of registry, work folder,
temporary folder, home and working directory, and all that was printed, are searched for parts of
the markers: as text, as numbers, and as bytes of integer tensors. Only the captured traffic itself
may have them. A case is one marker after one cycle; lost is one that was found elsewhere.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, write_result
from support.learn_outcomes import MARKERS, OUTCOMES, Sandbox
from support.learn_world import make_world
from support.marker import files_with

RESULT = ROOT / "results" / "reliability" / "privacy.json"


def run(folder: Path, rounds: int) -> dict[str, Any]:
    world = make_world(folder / "world")
    outcomes = []
    for outcome in OUTCOMES:
        cases = lost = searched = 0
        for number in range(rounds):
            sandbox = Sandbox(world, folder / outcome.replace(" ", "-") / str(number))
            ended = sandbox.run(outcome)
            cases += len(MARKERS)
            searched += ended.searched
            if ended.found or ended.left:
                print(outcome, ended.found, ended.left, flush=True)
                places = [path.parent for path in ended.found]
                lost += sum(bool(files_with([each], places)[0]) for each in MARKERS) or 1
            assert len(files_with(MARKERS, [sandbox.traffic])[0]) > 0  # the search finds them there
        outcomes.append({"name": outcome, "cases": cases, "lost": lost, "files_searched": searched})
    return {
        "name": "privacy: text of users outside the captured traffic, by outcome of a cycle",
        "cases": sum(each["cases"] for each in outcomes),
        "lost": sum(each["lost"] for each in outcomes),
        "command": "python experiments/privacy_marker.py",
        "outcomes": outcomes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="cycles of each outcome")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), arguments.rounds)
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
