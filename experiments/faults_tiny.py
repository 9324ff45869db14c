"""How stock vLLM and Leadout react to every seeded fault.

For each fault a real engine is started on a tiny target and gets one request. For stock vLLM the
plugin is switched off. docs/build/fill_docs.py fills the page of the documentation.

    python experiments/faults_tiny.py --out results/faults/tiny.json

With `--stock FILE` what stock vLLM does is taken from an earlier result: it changes with vLLM only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.progress import track

from common import ROOT, provenance
from leadout.checkpoints import CheckpointError, write_checkpoint
from leadout.engine.pair import UnfitPairError
from leadout.engine.serve_plan import make_plan
from leadout.engine.settings import ServeSettings
from leadout.pairing import read_target
from leadout.settings import SettingsError
from support.drafters import TINY_DRAFTER, random_drafter
from support.faults import FAULTS, UNDETECTABLE, Fault, serve_flags
from support.models import tiny_llama

CONFIG = replace(TINY_DRAFTER, target_num_layers=4)
STOCK = {
    "LEADOUT_PLUGIN": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
DEFAULTS = {"max_model_len": 128, "dtype": "float32", "max_num_seqs": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stock", type=Path)
    arguments = parser.parse_args()
    known = {}
    if arguments.stock is not None:
        earlier = json.loads(arguments.stock.read_text())["faults"]
        known = {row["fault"]: row["stock"] for row in earlier}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_llama().save_pretrained(folder / "target")
        write_checkpoint(folder / "healthy", random_drafter(CONFIG).state_dict(), CONFIG, "zlab")
        facts = read_target(folder / "target", "target")
        here = [fault for fault in (*FAULTS, *UNDETECTABLE) if not fault.engine_facts]
        for fault in track(here, description="faults"):
            faulty = fault.make(folder / "healthy", folder / fault.name, facts)
            rows.append(
                {
                    "fault": fault.name,
                    "rule": fault.rule,
                    "stock": known.get(fault.name)
                    or stock_outcome(folder / "target", faulty, fault),
                    "leadout": _without_paths(leadout_outcome(folder / "target", faulty, fault)),
                }
            )
    result = {"provenance": provenance(), "faults": rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


def stock_outcome(target: Path, drafter: Path, fault: Fault) -> str:
    settings = {**DEFAULTS, **fault.engine_arguments}
    count = settings.pop("num_speculative_tokens", CONFIG.max_draft_tokens)
    engine = [sys.executable, "-m", "support.tiny_engine", target, drafter, str(count)]
    ended = subprocess.run(
        [*engine, "--settings", json.dumps(settings)],
        cwd=ROOT / "tests",
        env={**os.environ, **STOCK},
        capture_output=True,
        text=True,
    )
    if "RESULT " in ended.stdout:
        return "serves, no error"
    moment = "crashes at the first request" if "STARTED" in ended.stdout else "does not start"
    # Tracebacks of a worker start with its rank.
    line = r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b.*)"
    errors = re.findall(line, ended.stderr, re.MULTILINE)
    last = errors[-1] if errors else f"exit code {ended.returncode}"
    return f"{moment}: {_without_paths(last)[:120]}"


def leadout_outcome(target: Path, drafter: Path, fault: Fault) -> str:
    try:
        flags = serve_flags(fault, **DEFAULTS)
        settings = ServeSettings(target=str(target), draft=str(drafter), vllm_flags=flags)
        plan = make_plan(settings)
    except (UnfitPairError, CheckpointError, SettingsError) as refused:
        return "refuses: " + str(refused).removeprefix("target and drafter do not fit\n")
    # Notes of a healthy pair, too, but for the rule that the fault breaks.
    usual = tuple({"K = ", "on CPUs ", "batched-tokens: "} - {f"{fault.rule}: "})
    notes = [note for note in plan.notes if not note.startswith(usual)]
    if fault.rule is None:
        return "serves; only acceptance shows it"
    return ("corrects it: " if fault.is_corrected else "serves and warns: ") + "; ".join(notes)


def _without_paths(text: str) -> str:
    return re.sub(r"/\S*/(\w[\w.-]*)", r"\1", text)


if __name__ == "__main__":
    main()
