"""What vLLM resolves on faked GPUs: `leadout serve` differs from plain vLLM only with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.fake_gpu import GPUS
from support.gpu_resolution import MODES, REASONS, Mode, differences, rows_on
from support.models import ROOT

COMMITTED = ROOT / "results" / "gpu" / "resolution.json"
REMAKE = "run python experiments/gpu_resolution.py --out results/gpu/resolution.json"


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(COMMITTED.read_text())
    return found


@pytest.mark.parametrize("gpu", GPUS)
def test_the_committed_table_is_what_is_resolved_now(gpu: str, committed: dict[str, Any]) -> None:
    rows = [row for row in committed["rows"] if row["gpu"] == gpu]
    now = [{"gpu": gpu, **row} for row in rows_on(gpu)]
    for old, new in zip(rows, now, strict=True):
        assert old == new, REMAKE


def test_every_difference_from_plain_vllm_has_a_reason(committed: dict[str, Any]) -> None:
    ours = [row for row in committed["rows"] if "compared_with" in row]
    assert len(ours) == len(GPUS) * len(MODES)
    for row in ours:
        for difference in row.get("differs", ()):
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
