"""The output of the quickstart's commands, from the results they wrote; see fill_docs.py.

run_quickstart.py runs the commands and stores their results in results/quickstart.
"""

import io
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from result_tables import ROOT, table
from rich.console import Console

from leadout.bench.results import BenchResult
from leadout.check.result import CheckResult
from leadout.control.tuned_file import read_tuned

RESULTS = ROOT / "results" / "quickstart"
DRAFTER = "drafters/smollm2-135m-instruct-dflash"
PROMPTS = "examples/prompts.jsonl"
CHECK = f"leadout check smollm2 {DRAFTER} --dtype float32 --report check.html"
TUNE = f"""\
leadout tune smollm2 {DRAFTER} \\
    --prompts {PROMPTS} --max-batch 4 --out tuned.json --dtype float32"""
BENCH = f"""\
leadout bench smollm2 --draft {DRAFTER} --tuned tuned.json \\
    --prompts {PROMPTS} --concurrency 1 --concurrency 4 \\
    --rounds 10 --seconds 3 --output-tokens 64 --out bench -- --dtype float32"""
SERVE = f"leadout serve smollm2 --draft {DRAFTER} --tuned tuned.json --dtype float32"
FLAGS = "--enforce-eager --max-model-len 2048 --port 8000"
GAUGES = "leadout:acceptance"
# Steps whose times are known.
STEPS = {
    "install": "install into an empty environment",
    "model": "make the model",
    "check": "`leadout check`",
    "tune": "`leadout tune`",
    "bench": "`leadout bench`",
}
MEASURED = ("install", "model", "tune")  # the shortest way to a speed-up with an interval
ASK = """\
curl -s localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
    "model": "smollm2", "temperature": 0, "max_tokens": 96,
    "messages": [{"role": "user", "content": "Write a Python function that adds two numbers."}]
  }' | python -m json.tool | grep -E '"(content|completion_tokens)"'"""


def check() -> str:
    from leadout.check.report import print_result

    result = CheckResult.model_validate_json((RESULTS / "check.json").read_text())
    return _console(
        CHECK, _printed(lambda console: print_result(result, console, written=[Path("check.html")]))
    )


def tune() -> str:
    from leadout.tune.report import print_tuned

    tuned = read_tuned(RESULTS / "tuned.json")
    out, page = Path("tuned.json"), Path("tuned.html")
    return _console(TUNE, _printed(lambda console: print_tuned(tuned, out, page, console)))


def bench() -> str:
    from leadout.bench.report import print_result

    result = BenchResult.model_validate_json((RESULTS / "bench.json").read_text())
    return _console(BENCH, _printed(lambda console: print_result(result, console), width=100))


def times() -> str:
    """Minutes of every step from an empty environment, and of all steps up to a speed-up."""
    seconds = json.loads((RESULTS / "times.json").read_text())["seconds"]
    for step, name in (("check", "check.json"), ("tune", "tuned.json"), ("bench", "bench.json")):
        made = json.loads((RESULTS / name).read_text())["provenance"]
        start, end = (datetime.fromisoformat(made[when]) for when in ("started", "ended"))
        seconds[step] = (end - start).total_seconds()
    rows = [(text, f"{seconds[step] / 60:.1f}") for step, text in STEPS.items()]
    shortest = sum(seconds[step] for step in MEASURED) / 60
    first = "install, model and `leadout tune`: the first measured speed-up"
    rows.append((first, f"{shortest:.1f}"))
    return table(("step", "minutes"), rows)


def plan() -> str:
    return _console(f"{SERVE} --plan", (RESULTS / "plan.txt").read_text())


def serve() -> str:
    """A server, one answer, and the gauges afterwards."""
    answer = json.loads((RESULTS / "answer.json").read_text())
    lines = json.dumps(answer, indent=4).splitlines(keepends=True)
    shown = "".join(x for x in lines if '"content"' in x or '"completion_tokens"' in x)
    steps = [
        (f"{SERVE} \\\n    {FLAGS} > server.log 2>&1 &", ""),
        ("until curl -sf localhost:8000/health; do sleep 1; done", ""),
        (ASK, shown),
        (f"curl -s localhost:8000/metrics | grep ^{GAUGES}", (RESULTS / "metrics.txt").read_text()),
        ("kill %1", ""),
    ]
    return "```console\n" + "".join(f"$ {command}\n{printed}" for command, printed in steps) + "```"


def _printed(show: Callable[[Console], None], width: int = 80) -> str:
    text = io.StringIO()
    show(Console(file=text, width=width))
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _console(command: str, printed: str) -> str:
    return f"```console\n$ {command}\n{printed}```"
