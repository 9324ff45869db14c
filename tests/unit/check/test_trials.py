"""Changes of the drafter are tested on texts that did not choose them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from leadout.check.hypotheses import Variant
from leadout.check.trials import (
    FINALISTS,
    LARGE_GAIN,
    Trial,
    findings_of,
    parts_of,
    repair_of,
    screen_and_test,
)
from leadout.evaluate.acceptance import Gain, gain_of_sums
from leadout.findings import Severity
from leadout.stats import Floats
from support.drafters import TINY_DRAFTER

TEXTS, POSITIONS = 54, 45


def variant(name: str) -> Variant:
    return Variant(name, f"{name}: 1 -> 2", TINY_DRAFTER)


class Measured:
    """Accepted drafts of each text by variant, and a record of which texts were asked for."""

    def __init__(self, after: dict[str, Floats], before: Floats) -> None:
        self._after, self._before = after, before
        self.asked: list[tuple[str, list[int]]] = []

    def __call__(self, variant: Variant, texts: Sequence[int]) -> Gain:
        self.asked.append((variant.cause, list(texts)))
        chosen = list(texts)
        sizes = np.full(len(chosen), float(POSITIONS))
        return gain_of_sums(self._before[chosen], self._after[variant.cause][chosen], sizes)

    def trials(self) -> list[Trial]:
        return screen_and_test([variant(name) for name in self._after], self, len(self._before))


def measured(gains: dict[str, float], seed: int = 0, texts: int = TEXTS) -> Measured:
    """Variants with these gains in drafts per position, and the noise of real texts."""
    draw = np.random.default_rng(seed)
    before = draw.gamma(8, POSITIONS / 8, texts).round()
    noise = {name: draw.normal(0, 0.1 * POSITIONS, texts) for name in gains}
    after = {
        name: (before + gain * POSITIONS + noise[name]).round() for name, gain in gains.items()
    }
    return Measured(after, before)


@pytest.mark.parametrize("texts", [0, 1, 2, 3, 20, 54])
def test_no_text_both_screens_and_tests(texts: int) -> None:
    parts = parts_of(texts)
    assert sorted([*parts.screening, *parts.testing]) == list(range(texts))
    assert len(parts.testing) >= texts // 2


def test_no_finalist_is_tested_on_texts_that_chose_it() -> None:
    subject = measured({f"v{i}": i / 100 for i in range(20)})
    trials = subject.trials()
    parts = parts_of(TEXTS)
    screening, testing = subject.asked[:20], subject.asked[20:]
    assert all(texts == parts.screening for _, texts in screening)
    assert all(texts == parts.testing for _, texts in testing)
    assert len(testing) == FINALISTS
    assert [trial.p_value is None for trial in trials] == [False] * FINALISTS + [True] * 14
    assert {trial.texts for trial in trials[:FINALISTS]} == {len(parts.testing)}


def test_variants_that_gain_nothing_are_not_tested_and_do_not_weaken_the_others() -> None:
    alone = measured({"good": 0.1})
    (expected,) = alone.trials()
    before = alone._before
    crowded = Measured({**alone._after, **{f"same{i}": before for i in range(10)}}, before)
    first, *others = crowded.trials()
    assert first.variant.cause == "good"
    assert first.p_value == expected.p_value
    assert all(trial.p_value is None for trial in others)


def test_a_real_gain_is_found_and_a_loss_is_not() -> None:
    found = findings_of(measured({"good": 0.1, "none": 0.0, "bad": -0.3}).trials())
    assert [each.name for each in found] == ["good"]
    assert found[0].severity is Severity.WARNING
    assert 0 <= float(str(found[0].evidence["p_value"])) < 0.05
    large = findings_of(measured({"good": 1.0, "none": 0.0}).trials())
    assert [(each.name, each.severity) for each in large] == [("good", Severity.ERROR)]


def test_variants_without_effect_are_rarely_findings(nightly: bool) -> None:
    # The best of 30 on the texts that chose it is "significant" nearly always.
    names = {f"v{i}": 0.0 for i in range(30)}
    count = 100 if nightly else 30
    false = sum(bool(findings_of(measured(names, seed).trials())) for seed in range(count))
    assert false <= 0.1 * count  # expected: at most half of it; the other half are losses

    def naive(seed: int) -> bool:
        subject = measured(names, seed)
        gains = [subject(variant(name), range(TEXTS)) for name in names]
        return any(gain.p_value < 0.05 and gain.after > gain.before for gain in gains)

    assert sum(map(naive, range(count))) > 0.3 * count


def test_what_was_only_screened_or_is_not_significant_is_no_finding() -> None:
    proven = measured({"good": 0.5}).trials()[0]
    assert findings_of([proven])
    assert repair_of([proven]) is proven.variant
    for unproven in (replace(proven, p_value=None), replace(proven, p_value=0.06)):
        assert unproven.gain.relative > LARGE_GAIN / 2
        assert findings_of([unproven]) == []
        assert repair_of([unproven]) is None


def test_too_few_texts_prove_nothing() -> None:
    for texts in (1, 2):
        assert findings_of(measured({"good": 2.0}, texts=texts).trials()) == []
