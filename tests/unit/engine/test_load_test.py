"""Results of vLLM's load generator count only if every request succeeded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from leadout.engine.child_process import EngineError
from leadout.engine.load_test import LoadGenerator, LoadRequest, generator_flags, result_of

REQUEST = LoadRequest(
    url="http://127.0.0.1:9", prompts=Path("p.jsonl"), requests=2, concurrency=2, output_tokens=5
)


def raw(**changes: Any) -> dict[str, Any]:
    """The fields of the generator's result that we read, as it names them."""
    return {
        "failed": 0,
        "completed": 2,
        "errors": ["", ""],
        "output_lens": [5, 5],
        "total_input_tokens": 30,
        "total_output_tokens": 10,
        "duration": 0.5,
        "output_throughput": 20.0,
        "ttfts": [0.1, 0.2],
        "latencies": [0.5, 0.4],
        "median_itl_ms": 40.0,
        "p99_itl_ms": 90.0,
        **changes,
    }


def test_times_are_in_seconds_and_tpot_excludes_the_first_token() -> None:
    found = result_of(raw(), REQUEST)
    assert found.tokens_per_second == 20.0
    assert found.tpots == pytest.approx([0.1, 0.05])
    assert (found.itl_median, found.itl_p99) == (0.04, 0.09)
    assert found.drafting is None


def test_acceptance_length_comes_from_the_speculation_counters() -> None:
    found = result_of(
        raw(
            spec_decode_num_drafts=4,
            spec_decode_draft_tokens=12,
            spec_decode_accepted_tokens=6,
            spec_decode_per_position_acceptance_rates=[1.0, 0.25, 0.25],
        ),
        REQUEST,
    )
    assert found.drafting is not None
    assert found.drafting.acceptance_length == 2.5


def test_a_failed_request_is_an_error_with_its_reason() -> None:
    broken = raw(failed=1, completed=1, errors=["", "Traceback\n  deep\nBad Request"])
    with pytest.raises(EngineError, match=r"Only 1 of 2 requests succeeded.*Bad Request"):
        result_of(broken, REQUEST)


def test_responses_of_different_length_are_an_error() -> None:
    with pytest.raises(EngineError, match="3 to 5 tokens, expected 5 each"):
        result_of(raw(output_lens=[3, 5]), REQUEST)


def test_loads_are_greedy_and_of_fixed_length() -> None:
    flags = generator_flags(REQUEST)
    assert "--ignore-eos" in flags
    assert flags[flags.index("--temperature") + 1] == "0"
    assert flags[flags.index("--custom-output-len") + 1] == "5"


def test_a_generator_that_dies_is_an_error_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stands for an interpreter in which the generator cannot run.
    false = tmp_path / "python"
    false.write_text("#!/bin/sh\necho no generator here >&2\nexit 3\n")
    false.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(false))
    with (
        LoadGenerator(tmp_path / "log") as generator,
        pytest.raises(EngineError, match="no generator here"),
    ):
        generator.run(REQUEST)
