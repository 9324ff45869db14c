"""The ladder of K: declared to vLLM by the server's plan, and read from vLLM's config."""

from types import SimpleNamespace
from typing import Any

import pytest

from leadout.engine.draft_plan import ladder_table
from leadout.engine.scheduler import ladder_of, requests_in_step
from leadout.engine.tuned_plan import DRAFT_LENGTH_BY_BATCH


def fake_config(
    sequences: int = 256,
    table: list[tuple[int, int, int]] | None = None,
    *,
    is_v2: bool = True,
    max_drafts: int = 15,
    has_full_graphs: bool = True,
) -> Any:
    """Stands for the config of a GPU server."""
    mode = SimpleNamespace(has_full_cudagraphs=lambda: has_full_graphs)
    return SimpleNamespace(
        use_v2_model_runner=is_v2,
        num_speculative_tokens=max_drafts,
        scheduler_config=SimpleNamespace(max_num_seqs=sequences),
        speculative_config=SimpleNamespace(num_speculative_tokens_per_batch_size=table),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
    )


@pytest.mark.parametrize("sequences", [9, 64, 1024])
def test_vllm_captures_a_graph_for_each_rung(sequences: int) -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    table = ladder_table(15, {}, fake_config(sequences))[DRAFT_LENGTH_BY_BATCH]
    dense = build_dynamic_sd_schedule_lookup(table, sequences, 15)[1:]
    assert set(dense) == {0, 1, 3, 7, 15}
    assert dense.count(15) == sequences - 4  # what vLLM drafts if live control is off
    assert ladder_of(fake_config(sequences, table)) == (0, 1, 3, 7, 15)


def test_few_sequences_shorten_the_ladder() -> None:
    table = ladder_table(15, {}, fake_config(4))[DRAFT_LENGTH_BY_BATCH]
    assert table == [(1, 1, 15), (2, 2, 7), (3, 3, 3), (4, 4, 0)]
    assert ladder_of(fake_config(4, table)) == (0, 3, 7, 15)
    assert ladder_table(15, {}, fake_config(2)) == {DRAFT_LENGTH_BY_BATCH: [(1, 1, 15), (2, 2, 0)]}


def test_there_is_no_table_where_it_has_no_effect() -> None:
    assert ladder_table(15, {}, fake_config(is_v2=False)) == {}
    assert ladder_table(15, {}, fake_config(1)) == {}
    assert ladder_table(15, {DRAFT_LENGTH_BY_BATCH: [(1, 8, 3)]}, fake_config()) == {}


def test_ladder_without_a_table() -> None:
    assert ladder_of(fake_config(max_drafts=7)) == (0, 7)  # the only graphs that vLLM captures
    without_graphs = fake_config(max_drafts=3, has_full_graphs=False)
    assert ladder_of(without_graphs) == (0, 1, 2, 3)
    assert ladder_of(fake_config(table=[(1, 8, 3), (9, 256, 20)], max_drafts=7)) == (0, 3, 7)


def test_requests_that_fit_into_a_step() -> None:
    """By the budget of an A100 and of an H100, with K up to 15."""
    config = fake_config()
    config.speculative_config.max_num_new_slots_for_drafting = 15
    scheduling = config.scheduler_config
    scheduling.max_num_batched_tokens, scheduling.max_num_scheduled_tokens = 2048, None
    ladder = (0, 1, 3, 7, 15)
    assert [requests_in_step(config, k) for k in ladder] == [128, 120, 107, 89, 66]
    scheduling.max_num_batched_tokens, scheduling.max_num_scheduled_tokens = 8192, 1024
    assert [requests_in_step(config, k) for k in (0, 15)] == [512, 64]
