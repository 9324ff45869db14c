"""Which decoding steps run in full CUDA graphs on faked GPUs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.fake_gpu import GPUS
from support.gpu_dispatch import CONCURRENCIES, DECODE_STEPS, FIXED_STEPS, MODES, cells_on
from support.models import ROOT

COMMITTED = ROOT / "results" / "gpu" / "dispatch.json"
REMAKE = "run python experiments/gpu_dispatch.py --out results/gpu/dispatch.json"
REPLAYED = 13  # requests at every change; all counts on all GPUs take long
MIN_FULL = 0.99


@pytest.fixture(scope="module")
def committed() -> dict[tuple[str, str, int], dict[str, Any]]:
    cells = json.loads(COMMITTED.read_text())["cells"]
    return {(cell["gpu"], cell["mode"], cell["concurrency"]): cell for cell in cells}


NIGHTLY = [pytest.param(gpu, CONCURRENCIES, marks=pytest.mark.nightly) for gpu in GPUS]


@pytest.mark.parametrize(("gpu", "counts"), [("L4", (REPLAYED,)), *NIGHTLY], ids=str)
def test_the_committed_shares_are_those_of_a_replay_now(
    gpu: str,
    counts: tuple[int, ...],
    committed: dict[tuple[str, str, int], dict[str, Any]],
) -> None:
    for cell in cells_on(gpu, counts):
        assert committed[gpu, cell["mode"], cell["concurrency"]] == {"gpu": gpu, **cell}, REMAKE


def test_every_cell_was_replayed(committed: dict[tuple[str, str, int], dict[str, Any]]) -> None:
    assert len(committed) == len(GPUS) * len(MODES) * len(CONCURRENCIES)
    for cell in committed.values():
        assert cell["decode_steps"] >= (DECODE_STEPS if "--live" in cell["mode"] else FIXED_STEPS)


@pytest.mark.parametrize("gpu", GPUS)
def test_live_and_tuned_servers_decode_in_full_graphs(
    gpu: str, committed: dict[tuple[str, str, int], dict[str, Any]]
) -> None:
    for (name, mode, count), cell in committed.items():
        if name == gpu and mode != MODES[0].name:
            assert cell["full"] >= MIN_FULL, (mode, count)


@pytest.mark.parametrize("gpu", GPUS)
def test_one_length_for_all_requests_runs_in_full_graphs_up_to_the_largest_capture(
    gpu: str, committed: dict[tuple[str, str, int], dict[str, Any]]
) -> None:
    """Plain vLLM's way; that the share can be 0 shows that a replay can fail."""
    shares = {count: committed[gpu, MODES[0].name, count]["full"] for count in CONCURRENCIES}
    assert shares[1] == shares[5] == shares[13] == shares[31] == 1.0
    # 64 x 16 tokens: captured on Blackwell only.
    assert shares[64] == (1.0 if gpu == "B200" else 0.0)
