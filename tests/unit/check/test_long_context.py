"""Acceptance that falls with the length of the context is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from leadout.check.long_context import (
    compare,
    context_lengths,
    context_limit,
    describe,
    finding_of,
    set_name,
)
from leadout.check.result import LongContext
from leadout.dflash.config import LayerAttention
from leadout.engine.offline import SetRun
from leadout.findings import Severity
from support.drafters import MINI

LENGTHS = (240, 960, 1920)
TASKS = 6
PROMPTS = {set_name(length): [[1] * length] * TASKS for length in LENGTHS}
DRAFTER = replace(MINI, max_positions=4096)


def served(length: int, by_task: list[list[int]]) -> SetRun:
    """A run with these tokens of each step after that of the prompt."""
    return SetRun(
        prompt_set=set_name(length),
        temperature=0.0,
        answers=[[5] * (1 + sum(steps)) for steps in by_task],
        steps=0,
        accepted_by_position=[],
        by_step=[[1, *steps] for steps in by_task],
        cached_tokens=[0] * len(by_task),
    )


def measured(*by_length: list[list[int]]) -> LongContext:
    runs = [served(*each) for each in zip(LENGTHS, by_length, strict=True)]
    return compare(runs, PROMPTS, DRAFTER, 8192, 2048)


GOOD = [[4, 4, 4, 4], [1, 2, 3], [4, 2, 2, 4], [3, 3], [2, 3, 4], [4, 4, 1]]
POOR = [[1, 2, 1, 1], [1, 1, 1], [2, 1, 1, 1], [1, 1], [1, 2, 1], [1, 1, 1]]


def test_equal_acceptance_is_no_finding() -> None:
    found = measured(GOOD, GOOD, GOOD)
    assert [each.tokens for each in found.contexts] == list(LENGTHS)
    assert found.contexts[0].length.value == pytest.approx(58 / 19)
    assert found.contexts[0].length.low < 58 / 19 < found.contexts[0].length.high
    assert found.ratio.low == found.ratio.high == 1
    assert finding_of(found) is None


def test_a_drop_in_the_longest_context_is_a_warning() -> None:
    found = measured(GOOD, GOOD, POOR)
    assert found.ratio.high < 0.8
    finding = finding_of(found)
    assert finding is not None
    assert (finding.name, finding.severity) == ("long-context", Severity.WARNING)
    assert "after 1920 tokens" in finding.message
    assert finding_of(measured(POOR, GOOD, GOOD)) is None


def test_one_poor_task_is_not_significant() -> None:
    assert finding_of(measured(GOOD, GOOD, [*GOOD[:-1], POOR[-1]])) is None


def test_an_answer_of_one_token_has_no_steps() -> None:
    found = measured([[]] * TASKS, GOOD, [[]] * TASKS)
    assert found.ratio.value == 1


def test_the_limits_are_named() -> None:
    assert "positions of the target: 8192, of the drafter: 4096" in describe(
        measured(GOOD, GOOD, GOOD)
    )
    windowed = replace(DRAFTER, layers=(LayerAttention(), LayerAttention(window=512)))
    runs = [served(length, GOOD) for length in LENGTHS]
    found = compare(runs, PROMPTS, windowed, None, 2048)
    assert (found.window, found.target_positions) == (512, None)
    assert "attention window of the drafter: 512" in describe(found)


@pytest.mark.parametrize(
    ("asked", "drafter", "target", "limit"),
    [
        (2048, 4096, 8192, 2048),
        (8192, 4096, 8192, 4096),
        (8192, 4096, 1024, 1024),
        (2048, 4096, None, 2048),
        (2048, 256, 8192, 0),
        (0, 4096, 8192, 0),
    ],
)
def test_the_limit_is_that_of_the_shortest_part(
    asked: int, drafter: int, target: int | None, limit: int
) -> None:
    assert context_limit(asked, replace(MINI, max_positions=drafter), target) == limit


def test_the_longest_context_leaves_room_for_the_answer() -> None:
    assert context_lengths(2048, 103) == [243, 648, 1945]
