"""Where full CUDA graphs end, and which sizes cover more requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from leadout.engine.cuda_graphs import (
    are_sizes_chosen,
    graph_notes,
    largest_batches,
    largest_full_graph,
    sizes_for,
    uncovered,
)

# vLLM's default sizes on an H100.
SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
TABLE = [(1, 8, 15), (9, 64, 7), (65, 1024, 0)]


def gpu_config(**changes: Any) -> Any:
    """Of a server on a GPU, which this machine does not have."""
    settings: dict[str, Any] = {
        "mode": CUDAGraphMode.FULL_AND_PIECEWISE,
        "sizes": SIZES,
        "table": None,
        "budget": 8192,
        "sequences": 1024,
        "v2": True,
        **changes,
    }
    return SimpleNamespace(
        use_v2_model_runner=settings["v2"],
        model_config=SimpleNamespace(enforce_eager=False),
        scheduler_config=SimpleNamespace(
            max_num_seqs=settings["sequences"], max_num_batched_tokens=settings["budget"]
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=settings["mode"], cudagraph_capture_sizes=settings["sizes"]
        ),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=15, num_speculative_tokens_per_batch_size=settings["table"]
        ),
    )


@pytest.mark.parametrize(
    ("drafts", "requests"),
    # With K = 6, 496 tokens are rounded up to 71 x 7, and 512 to more than was captured.
    [(15, 32), (7, 64), (0, 512), (6, 71), (600, 0)],
)
def test_the_largest_batch_with_a_full_graph(drafts: int, requests: int) -> None:
    assert largest_full_graph(SIZES, drafts) == requests


def test_a_size_of_its_own_covers_an_odd_multiple() -> None:
    assert largest_full_graph([*SIZES, 73 * 7], 6) == 73


def test_the_batches_of_a_table() -> None:
    assert largest_batches(TABLE, 1024) == {15: 8, 7: 64, 0: 1024}
    assert largest_batches(TABLE, 32) == {15: 8, 7: 32}
    assert largest_batches([(1, 2, 3), (3, 4, 1), (5, 6, 3)], 6) == {3: 6, 1: 4}


def test_where_full_graphs_end_is_noted() -> None:
    (note,) = graph_notes(gpu_config())
    assert "end at 32 requests with K = 15" in note
    assert "--max-cudagraph-capture-size 16384 would cover 1024" in note
    (note,) = graph_notes(gpu_config(table=TABLE))
    assert "end at 512 requests with K = 0" in note
    assert graph_notes(gpu_config(sequences=32)) == []


@pytest.mark.parametrize(
    "changes",
    [{"mode": CUDAGraphMode.PIECEWISE}, {"mode": CUDAGraphMode.NONE}, {"v2": False}],
)
def test_without_full_graphs_there_is_nothing_to_say(changes: dict[str, Any]) -> None:
    assert graph_notes(gpu_config(**changes)) == []


def test_sizes_for_what_was_measured_cover_it() -> None:
    batches = {15: 64, 7: 128, 0: 256}
    config = gpu_config()
    assert uncovered(config, batches) == {15: 32, 7: 64}
    sizes = sizes_for(config, batches)
    assert set(SIZES) < set(sizes)
    assert max(sizes) == 1024
    assert len(sizes) - len(SIZES) < 32
    assert uncovered(gpu_config(sizes=sizes), batches) == {}


def test_sizes_stay_within_the_budget_of_a_step() -> None:
    assert max(sizes_for(gpu_config(budget=700), {15: 64})) == 40 * 16


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ([], False),
        (["--cudagraph-capture-sizes", "1", "2"], True),
        (["--max-cudagraph-capture-size", "64"], True),
        (["-cc.max_cudagraph_capture_size", "64"], True),
        (["--compilation-config", '{"cudagraph_capture_sizes": [1, 2]}'], True),
        (["--compilation-config", '{"mode": 0}'], False),
    ],
)
def test_sizes_that_the_user_sets_are_recognised(flags: list[str], chosen: bool) -> None:
    from leadout.engine.vllm_flags import parse

    assert are_sizes_chosen(parse("target", flags)) is chosen
