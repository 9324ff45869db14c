"""The proof of losslessness on a real model, on a part of its prompts.

All 100 prompts, at the same batch sizes, are in results/lossless/smollm2.json.
"""

import json
import subprocess
import sys
from pathlib import Path

from support.models import ROOT
from support.shared import SHARED


def test_text_is_the_same_with_a_random_drafter_and_with_an_oracle(
    smollm2: Path, tmp_path: Path, nightly: bool
) -> None:
    count = 8 if nightly else 2  # one of each set
    sets = [SHARED / "data" / "prompts" / f"{name}.jsonl" for name in ("gsm8k", "humaneval")]
    result = tmp_path / "result.json"
    command = [sys.executable, ROOT / "experiments" / "lossless_smollm2.py", smollm2, *sets]
    options = ["--prompts", str(count), "--tokens", "20", "--batch-sizes", "1", str(count)]
    subprocess.run([*command, *options, "--out", result], check=True)
    arms = json.loads(result.read_text())["arms"]
    assert [(arm["drafter"], arm["batch_size"]) for arm in arms] == [
        ("random", 1),
        ("oracle", 1),
        ("random", count),
        ("oracle", count),
    ]
    assert all(arm["equal_texts"] == count for arm in arms)
    assert all(arm["acceptance_length"] == 8 for arm in arms if arm["drafter"] == "oracle")
    assert all(arm["acceptance_length"] < 1.5 for arm in arms if arm["drafter"] == "random")


def test_the_committed_proof_covers_100_prompts_of_three_sets() -> None:
    proof = json.loads((ROOT / "results" / "lossless" / "smollm2.json").read_text())
    assert len(proof["prompt_sets"]) == 3
    for arm in proof["arms"]:
        assert (arm["prompts"], arm["tokens"], arm["equal_texts"]) == (100, 64, 100)
