"""What `leadout tune` reports contains what `leadout bench` then measures."""

from __future__ import annotations

import speed_tables


def test_the_intervals_of_tune_contain_what_bench_measures() -> None:
    loads = speed_tables.loads()
    assert {each.pair for each in loads} == set(speed_tables.PAIRS)
    drafting = [each for each in loads if each.k]
    assert len(drafting) >= 8
    assert sum(each.is_contained for each in drafting) >= 0.9 * len(drafting)
    for each in loads:
        if each.k:
            assert each.measured["low"] <= each.tuned["high"], each
            assert each.measured["high"] >= each.tuned["low"], each
    # A server that drafts nothing is at most as fast as bare vLLM, and so is the end of tune's
    # interval there; the bench has an error in both directions.
    for each in loads:
        assert each.k or each.measured["low"] <= each.tuned["high"]


def test_a_speed_up_outside_the_interval_is_counted() -> None:
    tuned, measured = {"value": 1.5, "low": 1.4, "high": 1.6}, {"speedup": 1.3}
    assert not speed_tables.Load("a pair", 1, 3, tuned, 1.4, measured).is_contained
