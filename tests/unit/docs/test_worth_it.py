"""The page "Is it worth it for me?": its targets, its formulas, and what it says of its tables."""

from __future__ import annotations

import re
from itertools import pairwise
from statistics import median

import pytest
import worth_tables
from result_tables import result

from leadout.pairing.devices import BANDWIDTH_SHARE, PREFILL_SHARE
from leadout.pairing.sizes import sizes_from_config
from support.models import ROOT
from support.target_configs import CONFIGS

PAGE = (ROOT / "docs" / "worth-it.md").read_text()


@pytest.mark.parametrize("name", worth_tables.TARGETS)
def test_the_targets_of_the_page_are_the_published_ones(name: str) -> None:
    assert worth_tables.TARGETS[name] == sizes_from_config(CONFIGS[name], name)


def test_the_measured_target_is_the_published_one() -> None:
    assert worth_tables.small_target() == sizes_from_config(CONFIGS["SmolLM2-135M"], "SmolLM2")


def test_the_formula_on_the_page_has_the_shares_in_use() -> None:
    assert f"bandwidth x {BANDWIDTH_SHARE}" in PAGE
    assert f"operations per second x {PREFILL_SHARE}" in PAGE


def test_the_two_fitted_numbers_give_back_what_they_were_fitted_to() -> None:
    costs, tuned = worth_tables.fitted_costs(), result("bench/smollm2-tuned.json")
    assert costs.bare_seconds(1) == pytest.approx(tuned["verify"]["1"]["0"]["value"])
    head = costs.target.vocab_size * costs.target.hidden_size
    prefill = 2 * (costs.target.active_parameters - head) / costs.device.operations
    assert prefill == pytest.approx(tuned["prefill_bare"]["per_token"])


def test_the_arithmetic_predicts_what_was_measured() -> None:
    cells = worth_tables.compared()
    errors = [abs(computed / measured - 1) for computed, measured in cells.values()]
    assert len(errors) == 16
    assert median(errors) < 0.15
    assert max(errors) < 0.35


def gains(requests: int, probability: float, name: str) -> list[float]:
    """The best speed-up on each device."""
    ladder = (1, 3, 7)
    return [
        worth_tables.costs(name, device).best(requests, probability, ladder)[1]
        for device in worth_tables.DEVICES
    ]


DENSE = [name for name, target in worth_tables.TARGETS.items() if target.experts is None]


def test_dense_targets_gain_with_few_requests_and_large_ones_more() -> None:
    for probability in worth_tables.PROBABILITIES:
        by_target = [gains(1, probability, name) for name in DENSE]
        assert min(map(min, by_target)) > 1.3
        for smaller, larger in pairwise(by_target):
            assert all(a < b for a, b in zip(smaller, larger, strict=True))


def test_a_mixture_gains_with_many_requests_first() -> None:
    for probability in (0.5, 0.7):
        assert max(gains(1, probability, "gpt-oss-120b")) < worth_tables.MIN_GAIN
        assert max(gains(8, probability, "gpt-oss-120b")) < worth_tables.MIN_GAIN
    assert min(gains(32, 0.7, "gpt-oss-120b")) > 1.3


def test_dense_targets_gain_less_with_more_requests() -> None:
    for name in DENSE:
        for probability in worth_tables.PROBABILITIES:
            one, eight, many = (gains(load, probability, name) for load in worth_tables.REQUESTS)
            assert all(a > b > c for a, b, c in zip(one, eight, many, strict=True))


def test_a_cell_of_the_table_by_hand() -> None:
    costs = worth_tables.costs("Qwen3-8B", worth_tables.DEVICES[2])
    assert costs.device.name == "H100"
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| Qwen3-8B | H100 |")]
    first = row.split("|")[3].split(",")[0]
    # One request: 15.1 GB of weights, 0.3 GB of cache, 3.4 GB of drafter and head, at 2.68 TB/s;
    # and 8 tokens for each of 7.6 billion weights, 8 slots of a drafter of 0.96 billion, at 396
    # TFLOP/s. 2 tokens per step for drafts of 50%.
    bare = 15.4e9 / 2.68e12 + 15.1e9 / 396e12
    step = bare + 3.4e9 / 2.68e12 + (7 * 15.1e9 + 8 * 1.9e9 + 7 * 1.2e9) / 396e12
    assert float(first) == pytest.approx(1.99 * bare / step, abs=0.06)


def test_the_example_of_the_page_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    config = ROOT / "drafters" / "smollm2-135m-instruct-dflash"  # has the sizes of a decoder
    exec(compile(code.replace("path/to/target", str(config)), "page", "exec"), {})
