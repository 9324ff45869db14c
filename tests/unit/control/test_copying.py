"""Continuations copied from a request's own text."""

import random

import pytest

from leadout.control.prompt_lookup import CATCH_UP, CopyIndex


def slow(text: list[int], least: int, most: int) -> list[int]:
    """The same by looking through the whole text."""
    if len(text) < least:
        return []
    for end in range(len(text) - 1, least - 1, -1):
        if text[end - least : end] == text[-least:]:
            return text[end : end + most]
    return []


@pytest.mark.parametrize("least", [1, 2, 4])
def test_it_finds_what_a_search_through_the_text_finds(least: int) -> None:
    draws = random.Random(least)
    index, text = CopyIndex(least), [draws.randrange(3) for _ in range(20)]
    for _ in range(200):
        assert index.continuation(text, 5) == slow(text, least, 5)
        text += [draws.randrange(3) for _ in range(draws.randint(1, 4))]


def test_the_latest_occurrence_counts() -> None:
    assert CopyIndex(2).continuation([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]


def test_a_text_that_never_repeats_gives_nothing() -> None:
    index = CopyIndex(4)
    assert index.continuation(list(range(50)), 7) == []
    assert index.continuation([], 7) == []


def test_a_long_prompt_is_taken_in_over_several_steps() -> None:
    text = [*range(CATCH_UP), 5, 6, 7, 8]
    index = CopyIndex(4)
    assert index.continuation(text, 3) == []
    assert index.continuation(text, 3) == [9, 10, 11]


def test_a_match_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="found a match of 0 tokens"):
        CopyIndex(0)
