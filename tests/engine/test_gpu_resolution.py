"""What vLLM resolves on faked GPUs: `leadout serve` differs from plain vLLM only with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.fake_gpu import GPUS
from support.gpu_resolution import (
    MODES,
    REASONS,
    TABLE,
    TUNED_BATCHES,
    Mode,
    differences,
    rows_on,
    rows_with_table,
)
from support.models import ROOT

COMMITTED = ROOT / "results" / "gpu" / "resolution.json"
REMAKE = "run python experiments/gpu_resolution.py --out results/gpu/resolution.json"


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(COMMITTED.read_text())
    return found


# On one GPU at every change; the replays of test_gpu_dispatch resolve configs on another.
FIRST, *OTHERS = GPUS
EACH_GPU = [FIRST, *(pytest.param(gpu, marks=pytest.mark.nightly) for gpu in OTHERS)]


@pytest.mark.parametrize("gpu", EACH_GPU)
def test_the_committed_table_is_what_is_resolved_now(gpu: str, committed: dict[str, Any]) -> None:
    rows = [row for row in committed["rows"] if row["gpu"] == gpu]
    now = [{"gpu": gpu, **row} for row in rows_on(gpu)]
    for old, new in zip(rows, now, strict=True):
        assert old == new, REMAKE


def test_every_difference_from_plain_vllm_has_a_reason(committed: dict[str, Any]) -> None:
    ours = [row for row in committed["rows"] if "compared_with" in row]
    assert len(ours) == len(GPUS) * len(MODES)
    for row in ours:
        assert "refused" not in row, row
        for difference in row["differs"]:
            assert difference["reason"], f"{row['gpu']}, {row['mode']}: {difference}"


def test_every_reason_is_needed(committed: dict[str, Any]) -> None:
    stated = {reason for fields in REASONS.values() for reason in fields.values()}
    used = {each["reason"] for row in committed["rows"] for each in row.get("differs", ())}
    assert stated == used


def test_a_difference_without_a_reason_is_found() -> None:
    plain, ours = {"runner": "V2", "max_num_seqs": 256}, {"runner": "V1", "max_num_seqs": 256}
    assert differences(Mode(("--draft",)), plain, ours) == [
        {"field": "runner", "plain": "V2", "leadout": "V1", "reason": None}
    ]


def test_a_deviation_from_the_committed_table_is_found(committed: dict[str, Any]) -> None:
    """A row that `leadout serve` would change without a reason, seeded into what was resolved."""
    rows = {(row["gpu"], row["mode"]): row for row in committed["rows"]}
    plain, mode = rows["H100", "vllm, DFlash"], Mode(("--draft", "--live"))
    ours = {**rows["H100", mode.name], "async_scheduling": False, "max_num_batched_tokens": 31_744}
    found = {each["field"]: each["reason"] for each in differences(mode, _facts(plain), ours)}
    assert found["full_graphs"]
    assert found["async_scheduling"] is found["max_num_batched_tokens"] is None


def _facts(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("gpu", "mode")}


def test_full_graphs_have_no_gaps_and_the_drafter_has_some(committed: dict[str, Any]) -> None:
    for row in committed["rows"]:
        if "compared_with" not in row:
            continue
        assert row["graph_gaps"] == {}, (row["gpu"], row["mode"])
        if row["drafter_graphs"] is not None and row["capture_sizes"]:
            assert row["drafter_graphs"] >= 32, (row["gpu"], row["mode"])
    # Plain vLLM with a table: otherwise nothing of this would be needed.
    for row in committed["rows"]:
        if row["mode"] == TABLE:
            assert row["graph_gaps"].keys() == {"2", "6", "11"}
            assert row["drafter_graphs"] == 0


def test_a_table_of_the_users_has_no_gaps_either() -> None:
    plain, ours = rows_with_table(FIRST)
    assert plain["graph_gaps"]
    assert plain["drafter_graphs"] == 0
    # All that differs are the graphs: none is missing, and the drafter has its own.
    differing = {each["field"] for each in ours["differs"]}
    assert differing == {"capture_sizes", "graph_gaps", "graphs", "drafter_graphs"}
    assert ours["graph_gaps"] == {}
    assert ours["drafter_graphs"] >= 31


def test_full_graphs_cover_the_requests_that_were_tuned(committed: dict[str, Any]) -> None:
    for row in committed["rows"]:
        if row["mode"] == "leadout --draft --tuned":
            assert min(row["full_graphs"].values()) >= TUNED_BATCHES[-1]
            assert row["drafter_graphs"] >= TUNED_BATCHES[-1]


def test_plain_vllm_on_gpus_is_what_the_table_is_about(committed: dict[str, Any]) -> None:
    """Otherwise the fake platform would have been ignored."""
    for row in committed["rows"]:
        if row["mode"] in ("vllm", "vllm, DFlash"):
            assert row["runner"] == "V2"
            assert row["async_scheduling"] is True
            assert row["cudagraph_mode"] == "FULL_AND_PIECEWISE"
    attention = {row["gpu"]: row for row in committed["rows"] if row["mode"] == "vllm, DFlash"}
    assert attention["B200"]["target_attention"] == "FLASHINFER"
    assert {row["drafter_attention"] for row in attention.values()} == {"FLASH_ATTN"}
