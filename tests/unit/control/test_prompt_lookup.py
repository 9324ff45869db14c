"""Drafts from a request's own text."""

import random

import pytest

from leadout.control.prompt_lookup import MAX_INDEXED_AT_ONCE, PromptLookup


def linear_search(tokens: list[int], n: int, max_drafts: int) -> list[int]:
    if len(tokens) < n:
        return []
    for end in range(len(tokens) - 1, n - 1, -1):
        if tokens[end - n : end] == tokens[-n:]:
            return tokens[end : end + max_drafts]
    return []


@pytest.mark.parametrize("min_match", [1, 2, 4])
def test_index_finds_what_a_linear_search_finds(min_match: int) -> None:
    rng = random.Random(min_match)
    lookup, tokens = PromptLookup(min_match), [rng.randrange(3) for _ in range(20)]
    for _ in range(200):
        assert lookup.propose(tokens, 5) == linear_search(tokens, min_match, 5)
        tokens += [rng.randrange(3) for _ in range(rng.randint(1, 4))]


def test_latest_occurrence_is_used() -> None:
    assert PromptLookup(2).propose([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]


def test_text_without_repetition_gives_no_drafts() -> None:
    lookup = PromptLookup(4)
    assert lookup.propose(list(range(50)), 7) == []
    assert lookup.propose([], 7) == []


def test_long_prompt_is_indexed_over_several_steps() -> None:
    tokens = [*range(MAX_INDEXED_AT_ONCE), 5, 6, 7, 8]
    lookup = PromptLookup(4)
    assert lookup.propose(tokens, 3) == []
    assert lookup.propose(tokens, 3) == [9, 10, 11]


def test_empty_match_is_rejected() -> None:
    with pytest.raises(ValueError, match="min_match is 0, expected 1 or more"):
        PromptLookup(0)
