"""Numbers of a few dozen texts, and how far they can be trusted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leadout.evaluate.acceptance import TextAcceptance, paired_gain, tabulate
from leadout.stats import bootstrap, ratio_interval


def text(*steps: int) -> TextAcceptance:
    return TextAcceptance("set", 10, torch.tensor(steps), list(steps))


def test_acceptance_length_is_tokens_per_step() -> None:
    table = tabulate([text(2, 0, 3), text(1)], draft_tokens=3)
    assert table.steps == 4
    assert table.length.value == pytest.approx(1 + 6 / 4)
    assert [place.value for place in table.by_position] == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert sum(place.value for place in table.by_position) == pytest.approx(1.5)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    generator = torch.Generator().manual_seed(1)
    covered = 0
    for _ in range(200):
        rates = 0.4 + 0.2 * torch.rand(40, generator=generator)  # texts differ
        parts = torch.binomial(torch.full((40,), 30.0), rates, generator=generator).double()
        interval = ratio_interval(parts.numpy(), np.full(40, 30.0))
        covered += interval.low <= 0.5 <= interval.high
    assert 180 <= covered <= 198  # 95% of 200 is 190


def test_one_text_gives_no_false_certainty_and_the_same_number_twice() -> None:
    first = bootstrap(5, lambda draw: draw.mean(-1))
    assert first == bootstrap(5, lambda draw: draw.mean(-1))
    assert first.low < first.value < first.high


def test_a_small_gain_on_the_same_positions_is_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    before = [torch.randint(0, 7, (100,), generator=generator) for _ in range(30)]
    after = []
    for counts in before:
        better = counts.clone()
        better[torch.randperm(100, generator=generator)[:6]] += 1  # 1.5% more
        after.append(better)
    gain = paired_gain(before, after)
    assert gain.is_significant
    assert gain.relative == pytest.approx(0.06 / 4, rel=0.1)
    assert not paired_gain(after, before).is_significant
    assert not paired_gain(before, before).is_significant
