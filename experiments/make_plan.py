"""What `leadout make` plans for Qwen2.5-Coder-1.5B on this machine: the time of every stage.

    python experiments/make_plan.py TARGET PROMPTS_FOLDER --hours 4 --dtype float32

The recipe of docs/howto/make.md. It times matrix products and starts nothing. Writes
results/make/qwen2.5-coder-1.5b-plan.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from common import ROOT, write_result

RESULT = ROOT / "results" / "make" / "qwen2.5-coder-1.5b-plan.json"
SETTINGS = ROOT / "examples" / "qwen2.5-coder-drafter.yaml"
SETS = ("mbpp_train", "code_train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--hours", type=float, default=4)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    arguments = parser.parse_args()
    command = [
        *(sys.executable, "-m", "leadout", "make", arguments.target, "--plan", "--json"),
        *("--out", arguments.target.with_name("made"), "--hours", arguments.hours),
        *(word for name in SETS for word in ("--prompts", arguments.prompts / f"{name}.jsonl")),
        *("--max-batch", 4, "--train-config", SETTINGS),
        *("--dtype", arguments.dtype, "--max-model-len", 1024),
    ]
    words = [str(word) for word in command]
    planned = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = {"hours": arguments.hours, "dtype": arguments.dtype, "plan": json.loads(planned)}
    write_result(RESULT, found, target=arguments.target)


if __name__ == "__main__":
    main()
