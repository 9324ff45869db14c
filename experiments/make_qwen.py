"""`leadout make` for Qwen2.5-Coder-1.5B on this machine: what it plans, or the whole of it.

    python experiments/make_qwen.py TARGET PROMPTS_FOLDER --hours 4 --dtype float32 [--run]

The recipe of docs/howto/make.md. Without --run it times matrix products and starts nothing, and
writes results/make/qwen2.5-coder-1.5b-plan.json. With --run it makes the drafter in a folder beside
the target, or continues, and writes results/make/qwen2.5-coder-1.5b.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT, write_result

RESULTS = ROOT / "results" / "make"
SETTINGS = ROOT / "examples" / "qwen2.5-coder-drafter.yaml"
SETS = ("mbpp_train", "code_train")
ENDED = (0, 1, 3)  # with a result, whatever it is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--hours", type=float, default=4)
    parser.add_argument("--max-batch", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--run", action="store_true")
    arguments = parser.parse_args()
    out = arguments.target.with_name("made")
    command = [
        *(sys.executable, "-m", "leadout", "make", arguments.target, "--json", "--out", out),
        *("--hours", arguments.hours, "--max-batch", arguments.max_batch),
        *(word for name in SETS for word in ("--prompts", arguments.prompts / f"{name}.jsonl")),
        *("--train-config", SETTINGS, "--dtype", arguments.dtype, "--max-model-len", 1024),
        *(["--quick"] if arguments.quick else []),
        *([] if arguments.run else ["--plan"]),
    ]
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True)
    if done.returncode not in ENDED:
        sys.exit(done.returncode)
    printed = json.loads(done.stdout)
    found: dict[str, Any] = {
        "hours": arguments.hours,
        "max_batch": arguments.max_batch,
        "quick": arguments.quick,
        "dtype": arguments.dtype,
    }
    if arguments.run:
        state = json.loads((out / "make.json").read_text())
        found |= {"exit_code": done.returncode, "plan": state["plan"], "made": printed}
        write_result(RESULTS / "qwen2.5-coder-1.5b.json", found, target=arguments.target)
    else:
        found |= {"plan": printed}
        write_result(RESULTS / "qwen2.5-coder-1.5b-plan.json", found, target=arguments.target)


if __name__ == "__main__":
    main()
