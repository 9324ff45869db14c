"""An acceptance that drops on cache hits is found, and only real cache hits count."""

from __future__ import annotations

import pytest

from leadout.check.prefix_cache import compare, describe, finding_of, tokens_and_steps
from leadout.engine.offline import SetRun
from leadout.findings import Severity

TEXTS = 8
PROMPTS = {"long": [[1] * 300] * TEXTS, "short": [[2] * 20] * 3}
ANSWER = list(range(100, 148))


def served(
    tokens_per_step: int, cached: int, name: str = "long", answer: list[int] = ANSWER
) -> SetRun:
    """A run in which every step but that of the prompt writes this many tokens."""
    count = len(PROMPTS[name])
    full, rest = divmod(len(answer) - 1, tokens_per_step)
    by_step = [1, *[tokens_per_step] * full, *([rest] if rest else [])]
    return SetRun(
        prompt_set=name,
        temperature=0.0,
        answers=[answer] * count,
        steps=0,
        accepted_by_position=[],
        by_step=[by_step] * count,
        cached_tokens=[cached] * count,
    )


COLD = [served(3, 0), served(3, 0, "short")]


def test_equal_acceptance_is_no_finding() -> None:
    found = compare(PROMPTS, COLD, [served(3, 256)])
    assert (found.texts, found.other_texts) == (TEXTS, 3)
    assert (found.prompt_tokens, found.cached_tokens) == (TEXTS * 300, TEXTS * 256)
    assert found.cold == found.warm == pytest.approx(47 / 16)
    assert found.ratio is not None
    assert found.ratio.low == found.ratio.high == 1
    assert finding_of(found) is None
    assert "85% of their prompts in the cache" in describe(found)


def test_a_collapse_after_cache_hits_is_an_error() -> None:
    found = compare(PROMPTS, COLD, [served(1, 256)])
    assert (found.warm, found.texts) == (1.0, TEXTS)
    finding = finding_of(found)
    assert finding is not None
    assert (finding.name, finding.severity) == ("prefix-cache", Severity.ERROR)


def test_a_smaller_drop_is_a_warning_and_a_gain_is_none() -> None:
    cold, slower = served(6, 0), served(5, 256)
    finding = finding_of(compare(PROMPTS, [cold], [slower]))
    assert finding is not None
    assert finding.severity is Severity.WARNING
    assert finding_of(compare(PROMPTS, [served(5, 0)], [served(6, 256)])) is None


def test_a_drop_in_one_text_of_many_is_not_significant() -> None:
    warm = served(3, 256)
    by_step = [served(1, 256).by_step[0], *warm.by_step[1:]]
    found = compare(PROMPTS, COLD, [warm.model_copy(update={"by_step": by_step})])
    assert found.warm < found.cold
    assert finding_of(found) is None


@pytest.mark.parametrize("warm", [[], [served(1, 0)]])
def test_without_cache_hits_it_is_not_applicable(warm: list[SetRun]) -> None:
    found = compare(PROMPTS, COLD, warm)
    assert (found.texts, found.ratio) == (0, None)
    assert finding_of(found) is None
    assert describe(found).startswith("not applicable")


def test_tokens_that_were_cached_before_do_not_count() -> None:
    found = compare(PROMPTS, [served(3, 256)], [served(1, 256)])
    assert found.ratio is None


def test_texts_are_compared_up_to_the_first_difference() -> None:
    # After token 13 the texts differ: what is accepted there says nothing about the cache.
    other = [*ANSWER[:13], *[7] * (len(ANSWER) - 13)]
    warm = served(3, 256, answer=other)
    by_step = [[1, 3, 3, 3, 3, *[1] * (len(ANSWER) - 13)]] * TEXTS
    found = compare(PROMPTS, COLD, [warm.model_copy(update={"by_step": by_step})])
    assert found.cold == found.warm == 3


@pytest.mark.parametrize(
    ("by_step", "end", "expected"),
    [
        ([1, 3, 2, 4], 10, (9, 3)),
        ([1, 3, 2, 4], 6, (5, 2)),
        ([1, 3, 2, 4], 5, (3, 1)),
        ([1, 3], 1, (0, 0)),
        ([], 0, (0, 0)),
    ],
)
def test_only_whole_steps_count(by_step: list[int], end: int, expected: tuple[int, int]) -> None:
    assert tokens_and_steps(by_step, end) == expected
