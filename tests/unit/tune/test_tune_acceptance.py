"""Tokens per step by K: right for mixed texts, with intervals over prompts."""

import random

import pytest

from leadout.engine.calibration import Gained, RoundResult
from leadout.tune.fit import fit_acceptance

EASY, HARD = 0.95, 0.3
TOKENS, COUNTS = 40, (0, 1, 3, 5)


def gained(prompt: int, odds: float, k: int, dice: random.Random) -> Gained:
    """One request: steps until it has its tokens."""
    tokens: list[int] = []
    while sum(tokens) < TOKENS:
        stood = 0
        while stood < k and dice.random() < odds:
            stood += 1
        tokens.append(1 + stood)
    return Gained(prompt=prompt, tokens=tokens)


def one_round(k: int, requests: list[Gained]) -> RoundResult:
    return RoundResult(
        batch=len(requests), k=k, turns=[], gained=requests, prefill_bare=[], prefill_drafting=[]
    )


def rounds(prompts: int, seed: int = 0) -> list[RoundResult]:
    """Every other text is easy to draft."""
    dice = random.Random(seed)
    return [
        one_round(k, [gained(p, EASY if p % 2 else HARD, k, dice) for p in range(prompts)])
        for k in COUNTS
    ]


def length(odds: float, k: int) -> float:
    return sum(odds**n for n in range(k + 1))


def test_texts_count_by_their_tokens_not_by_their_steps() -> None:
    found = fit_acceptance(rounds(400))
    for k in COUNTS[1:]:
        # Half of the tokens are easy: a server's tokens over its steps.
        truth = 2 / (1 / length(EASY, k) + 1 / length(HARD, k))
        assert found.tokens[k].values[0].item() == pytest.approx(truth, rel=0.04)
    assert found.tokens[0].interval().high == 1


def test_intervals_are_over_prompts_and_cover_the_truth() -> None:
    truth = 2 / (1 / length(EASY, 5) + 1 / length(HARD, 5))
    covered, widths = 0, []
    for seed in range(30):
        interval = fit_acceptance(rounds(40, seed)).tokens[5].interval()
        covered += interval.low <= truth * 1.02 and truth <= interval.high
        widths.append(interval.high - interval.low)
    assert covered >= 26
    assert fit_acceptance(rounds(400)).tokens[5].interval().high < truth + min(widths)


def test_positions_are_those_of_the_largest_length() -> None:
    found = fit_acceptance([one_round(3, [Gained(prompt=0, tokens=[1, 2, 4, 4])])])
    assert [each.values[0].item() for each in found.by_position] == [0.75, 0.5, 0.5]
    assert (found.requests, found.steps) == (1, 4)
    assert found.tokens[3].values[0].item() == pytest.approx(11 / 4)
