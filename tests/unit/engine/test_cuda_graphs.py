"""Where full CUDA graphs end, and which sizes cover more requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from leadout.engine.cuda_graphs import (
    are_sizes_chosen,
    flags_for_all_batches,
    graph_notes,
    largest_batches,
    largest_full_graph,
    missing_sizes,
    sizes_for,
    uncovered,
)
from leadout.engine.vllm_flags import parse

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
    # A step has at most 8,192 tokens, which is 512 requests.
    assert "--max-cudagraph-capture-size 8192 would cover 512" in note
    (note,) = graph_notes(gpu_config(budget=32_768))
    assert "--max-cudagraph-capture-size 16384 would cover 1024" in note
    assert graph_notes(gpu_config(budget=512)) == []
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


def graph_of(sizes: list[int], lengths: list[int], requests: int, k: int) -> bool:
    """Whether vLLM has a full graph: of the next number of tokens that any K has a graph for."""
    graphs = {(-(-size // (1 + each)) * (1 + each), each) for size in sizes for each in lengths}
    following = min(tokens for tokens, _ in graphs if tokens >= requests * (1 + k))
    return (following, k) in graphs


@pytest.mark.parametrize("ladder", [[0, 1, 3, 7, 15], [0, 1, 4, 9], [0, 2, 5, 11], [0, 6]])
def test_every_batch_of_a_ladder_has_its_graph(ladder: list[int]) -> None:
    config = gpu_config()
    flags = flags_for_all_batches(parse("target", []), config, ladder)
    sizes = [int(size) for size in flags[1:]] or SIZES
    assert (flags == []) == (ladder == [0, 1, 3, 7, 15])  # for which vLLM's sizes are enough
    assert len(sizes) < 80
    for k in ladder:
        end = largest_full_graph(sizes, k)
        assert end >= 0.97 * largest_full_graph(SIZES, k)
        assert all(graph_of(sizes, ladder, requests, k) for requests in range(1, end + 1))


def test_graphs_of_different_k_get_in_each_others_way() -> None:
    """Otherwise nothing of this would be needed."""
    assert not graph_of(SIZES, [0, 2, 3], 5, 2)  # 15 tokens: the next graph is for 16, of K = 3
    assert missing_sizes(SIZES, {0: 512, 2: 168, 3: 128}, 1024)
    assert not missing_sizes(SIZES, {0: 512, 1: 256, 3: 128, 7: 64, 15: 32}, 1024)
    # With at most 50 requests, 104 tokens are no graph for K = 1.
    assert missing_sizes([*SIZES, 98], {1: 50, 3: 50}, 50) == {100}


@pytest.mark.parametrize(
    "changes", [{"mode": CUDAGraphMode.PIECEWISE}, {"mode": CUDAGraphMode.NONE}, {"v2": False}]
)
def test_without_full_graphs_no_sizes_are_set(changes: dict[str, Any]) -> None:
    assert flags_for_all_batches(parse("target", []), gpu_config(**changes), [0, 1, 4, 9]) == []


def test_sizes_that_the_user_sets_stay() -> None:
    parsed = parse("target", ["--cudagraph-capture-sizes", "1", "2"])
    assert flags_for_all_batches(parsed, gpu_config(), [0, 1, 4, 9]) == []


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
    assert are_sizes_chosen(parse("target", flags)) is chosen
