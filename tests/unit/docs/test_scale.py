"""The page on scale: its targets are the published ones, its rates follow by hand."""

from __future__ import annotations

import pytest
import scale_tables

from leadout.pairing.sizes import sizes_from_config
from support.target_configs import CONFIGS


@pytest.mark.parametrize("name", scale_tables.TARGETS)
def test_the_targets_of_the_page_are_the_published_ones(name: str) -> None:
    assert scale_tables.TARGETS[name] == sizes_from_config(CONFIGS[name], name)


def test_the_rates_of_a_row_by_hand() -> None:
    # The states that pass between servers and trainers, at the rate of the slower of the two.
    found = dict(scale_tables.layouts()[1:2])["Llama-3.3-70B"]
    assert (found.servers, found.trainers) == (4, 4)
    served = 4 * 989e12 * 0.4 / (2 * 68.5e9)
    assert found.tokens_per_second == pytest.approx(served, rel=0.01)
    assert found.bytes_per_second == pytest.approx(served * 6 * 8192 * 2, rel=0.01)
    assert found.hours(800_000 * 2048) == pytest.approx(800_000 * 2048 / served / 3600, rel=0.01)
