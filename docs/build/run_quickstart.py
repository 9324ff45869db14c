"""Run the quickstart's commands in full and store their results for the page.

    python docs/build/run_quickstart.py TARGET [--only check tune bench serve]

TARGET is the folder that examples/make_smollm2.py makes. The commands run in a temporary folder, in
which the target is called `smollm2` as on the page. Results are written to results/quickstart;
docs/build/fill_docs.py then puts them into docs/quickstart.md. Takes a quarter of an hour on two
cores.
"""

import argparse
import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path

from quickstart_output import ASK, BENCH, CHECK, FLAGS, GAUGES, RESULTS, SERVE, TUNE
from result_tables import ROOT

from leadout.engine.server import Server

PARTS = ("check", "tune", "bench", "serve")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "smollm2").symlink_to(arguments.target.resolve())
        for shared in ("drafters", "examples"):
            (folder / shared).symlink_to(ROOT / shared)
        if "check" in arguments.only:
            run(f"{CHECK} --save check.json", folder)
            shutil.copy(folder / "check.json", RESULTS)
        if "tune" in arguments.only:
            run(TUNE, folder)
            shutil.copy(folder / "tuned.json", RESULTS)
        shutil.copy(RESULTS / "tuned.json", folder)
        if "bench" in arguments.only:
            run(BENCH, folder)
        if "serve" in arguments.only:
            serve(folder)


def run(command: str, folder: Path) -> str:
    print(f"$ {command}", flush=True)
    ended = subprocess.run(
        ["bash", "-c", command], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    )
    return ended.stdout


def serve(folder: Path) -> None:
    """The plan, one answer, and the gauges afterwards."""
    plan = run(f"{SERVE} --plan 2>&1", folder)
    (RESULTS / "plan.txt").write_text(re.sub(r"/\S*/python[\d.]*", "python", plan))
    flags = FLAGS.partition(" --port")[0]
    command = ["bash", "-c", f'cd {folder}; exec {SERVE} {flags} "$@"', "serve"]
    with Server(command, log=folder / "server.log") as server:
        here = ASK.replace("localhost:8000", server.url).partition(" | python")[0]
        answer = json.loads(run(here, folder))
        kept = {"choices": answer["choices"], "usage": answer["usage"]}
        (RESULTS / "answer.json").write_text(json.dumps(kept, indent=2) + "\n")
        with urllib.request.urlopen(f"{server.url}/metrics") as response:
            lines = response.read().decode().splitlines(keepends=True)
    gauges = [line for line in lines if line.startswith(GAUGES)]
    (RESULTS / "metrics.txt").write_text("".join(gauges))


if __name__ == "__main__":
    main()
