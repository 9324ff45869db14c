"""The gate: each rule fires, all that fire are told, and chance does not pass for a gain."""

from __future__ import annotations

import random

import pytest
import torch

from leadout.check.result import Divergence, Lossless
from leadout.evaluate.acceptance import TextAcceptance
from leadout.findings import Finding, Severity
from leadout.learn.gate import (
    Comparison,
    Evidence,
    Margins,
    compare,
    compare_by_source,
    decide,
)
from leadout.stats import Interval

MARGINS = Margins(gain=0.03, base_loss=0.03)
EQUAL_TEXTS = Lossless(texts=16, equal_texts=16, divergences=[], largest_allowed_gap=0.0)
ERROR = Finding(name="weights-not-finite", severity=Severity.ERROR, message="NaN", remedy="-")
WARNING = Finding(name="engine-version", severity=Severity.WARNING, message="old", remedy="-")


def change(value: float, low: float, high: float) -> Comparison:
    length = Interval(value=2.0, low=1.9, high=2.1)
    return Comparison(
        requests=50,
        before=length,
        after=length,
        change=Interval(value=value, low=low, high=high),
    )


GOOD = Evidence(
    findings=[],
    traffic=change(0.2, 0.15, 0.25),
    base=change(-0.01, -0.02, 0.0),
    lossless=EQUAL_TEXTS,
)


def text(source: str, steps: list[int]) -> TextAcceptance:
    return TextAcceptance(source, 8, torch.tensor(steps), steps)


def drawn(seed: int, mean: float, count: int = 60, source: str = "traffic") -> list[TextAcceptance]:
    draw = random.Random(seed)
    return [
        text(source, [min(4, round(draw.expovariate(1 / mean))) for _ in range(30)])
        for _ in range(count)
    ]


def test_a_good_candidate_passes_and_is_told_by_its_numbers() -> None:
    decision = decide(GOOD, MARGINS)
    assert decision.passed
    assert "+20.0% (+15.0% to +25.0%) over 50 requests" in decision.reasons[0]


@pytest.mark.parametrize(
    ("changes", "blamed"),
    [
        ({"traffic": change(0.2, 0.02, 0.4)}, "traffic"),  # better, but not surely by the margin
        ({"base": change(-0.01, -0.04, 0.02)}, "base"),  # perhaps too much is lost
        ({"base_by_source": {"code": change(-0.1, -0.2, -0.04)}}, "base, code"),
        ({"findings": [ERROR]}, "weights-not-finite"),
        ({"lossless": None}, "not-lossless"),
        ({"traffic": None}, "traffic"),
        ({"base": None}, "base"),
        (
            {
                "lossless": Lossless(
                    texts=16,
                    equal_texts=15,
                    divergences=[Divergence(prompt_set="held out", position=3, logit_gap=0.5)],
                    largest_allowed_gap=0.0,
                )
            },
            "not-lossless",
        ),
    ],
)
def test_each_rule_fires_alone(changes: dict[str, object], blamed: str) -> None:
    decision = decide(GOOD.model_copy(update=changes), MARGINS)
    assert not decision.passed
    assert [reason.partition(":")[0] for reason in decision.reasons] == [blamed]


def test_everything_that_speaks_against_it_is_told() -> None:
    bad = GOOD.model_copy(
        update={
            "findings": [ERROR],
            "traffic": change(0.0, -0.1, 0.1),
            "base": change(-0.2, -0.3, -0.1),
            "base_by_source": {"code": change(-0.2, -0.3, -0.1)},
        }
    )
    told = [reason.partition(":")[0] for reason in decide(bad, MARGINS).reasons]
    assert told == ["weights-not-finite", "traffic", "base", "base, code"]


def test_warnings_do_not_reject_a_candidate() -> None:
    assert decide(GOOD.model_copy(update={"findings": [WARNING]}), MARGINS).passed


def test_a_source_that_may_have_lost_little_does_not_stop_it() -> None:
    by_source = {"code": change(-0.05, -0.2, 0.1)}
    assert decide(GOOD.model_copy(update={"base_by_source": by_source}), MARGINS).passed


def test_acceptance_lengths_are_those_of_all_steps() -> None:
    found = compare(
        [text("a", [0, 1]), text("a", [1, 1, 0, 0])], [text("a", [2, 1]), text("a", [1])]
    )
    assert found.before.value == pytest.approx(1.5)
    assert found.after.value == pytest.approx(1 + 4 / 3)
    assert found.change.value == pytest.approx((1 + 4 / 3) / 1.5 - 1)


def test_pairs_are_kept_together() -> None:
    """Texts differ much from each other; that both drafters saw the same ones takes it out."""
    before = [text("a", [number % 5] * 20) for number in range(40)]
    after = [text("a", [number % 5] * 19 + [min(4, number % 5 + 1)]) for number in range(40)]
    found = compare(before, after)
    assert found.before.high - found.before.low > 0.5
    assert found.change.high - found.change.low < 0.02


@pytest.mark.parametrize("seed", range(20))
def test_chance_alone_does_not_pass(seed: int) -> None:
    traffic = compare(drawn(seed, 1.2), drawn(seed + 1000, 1.2))
    assert traffic.change.low < MARGINS.gain


def test_a_real_gain_of_a_tenth_passes() -> None:
    traffic = compare(drawn(1, 1.0, 400), drawn(2, 1.35, 400))
    assert traffic.change.low > MARGINS.gain


def test_sources_are_compared_apart() -> None:
    before = [*drawn(1, 1.0, source="code"), *drawn(2, 1.0, source="chat")]
    after = [*drawn(1, 1.0, source="code"), *drawn(2, 0.4, source="chat")]
    found = compare_by_source(before, after)
    assert found["code"].change.value == 0
    assert found["chat"].change.high < -0.1
