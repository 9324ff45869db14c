"""The gate: each rule works alone, all broken rules are reported, and chance does not pass."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from leadout.check.result import Divergence, Lossless
from leadout.console import Progress
from leadout.evaluate.acceptance import TextAcceptance, acceptance_by_drafter
from leadout.findings import Finding, Severity
from leadout.learn.config import CycleSettings
from leadout.learn.gate import (
    Comparison,
    Evidence,
    Trial,
    compare,
    compare_by_source,
    decide,
    evaluate,
    requests_enough,
)
from leadout.stats import Interval
from support.gate_candidates import (
    CANDIDATES,
    Candidate,
    base_of,
    newest_requests,
    overfitted_part,
)
from support.learn_world import ALONE, World, lossless_by_reference

SETTINGS = CycleSettings(gain=0.03, base_loss=0.03)
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
    first=change(-0.01, -0.025, 0.0),
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


def text_of(accepted: int, steps: int, source: str = "a") -> TextAcceptance:
    return text(source, [accepted // steps + (place < accepted % steps) for place in range(steps)])


def test_a_good_candidate_passes_with_its_numbers_as_reasons() -> None:
    decision = decide(GOOD, SETTINGS)
    assert decision.passed
    assert "+20.0% (95% interval +15.0% to +25.0%) over 50 requests" in decision.reasons[0]


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"traffic": change(0.02, -0.1, 0.14)}, "traffic"),  # less than the margin
        ({"base": change(-0.04, -0.06, -0.02)}, "base"),
        ({"first": change(-0.04, -0.06, -0.02)}, "base since version 1"),
        ({"first_by_source": {"code": change(-0.1, -0.2, -0.04)}}, "base since version 1, code"),
        ({"first": None}, "base since version 1"),
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
def test_each_rule_rejects_alone(changes: dict[str, object], broken: str) -> None:
    decision = decide(GOOD.model_copy(update=changes), SETTINGS)
    assert decision.verdict == "rejected"
    assert [reason.partition(":")[0] for reason in decision.reasons] == [broken]


@pytest.mark.parametrize(
    ("changes", "rule", "limit"),
    [
        ({"traffic": change(0.05, 0.02, 0.08)}, "traffic", "+3.0%"),
        ({"base": change(-0.01, -0.04, 0.02)}, "base", "-3.0%"),
        ({"first": change(-0.01, -0.04, 0.02)}, "base since version 1", "-3.0%"),
    ],
)
def test_an_estimate_whose_bound_is_not_above_the_limit_is_undecided(
    changes: dict[str, object], rule: str, limit: str
) -> None:
    decision = decide(GOOD.model_copy(update=changes), SETTINGS)
    assert decision.verdict == "undecided"
    (reason,) = decision.reasons
    assert reason.startswith(f"{rule}: ")
    assert f"the lower bound must be above {limit}" in reason
    (enough,) = decision.enough.values()
    assert f"{enough} requests are probably enough" in reason
    assert 50 < enough <= 500


def test_the_bound_itself_is_not_enough() -> None:
    """An equal candidate has no gain, so it does not replace the serving version."""
    equal = GOOD.model_copy(update={"traffic": change(0.0, 0.0, 0.0)})
    assert decide(equal, CycleSettings()).verdict == "rejected"


def test_too_few_requests_have_no_bound() -> None:
    few = GOOD.model_copy(update={"base": change(0.0, 0.0, 0.0).model_copy(update={"requests": 3})})
    decision = decide(few, SETTINGS)
    assert decision.verdict == "undecided"
    assert decision.enough == {"base": 20}


def test_a_change_too_close_to_the_limit_is_rejected() -> None:
    close = change(0.031, 0.0, 0.062)  # would need hundreds of times more requests
    assert requests_enough(close, SETTINGS.gain) is None
    assert decide(GOOD.model_copy(update={"traffic": close}), SETTINGS).verdict == "rejected"


def test_enough_requests_decide_nine_times_of_ten() -> None:
    """In simulation: the true loss is 1%, and the deviation of a text 10%."""
    draw = random.Random(3)

    def measured(count: int) -> Comparison:
        before = [text_of(100, 100) for _ in range(count)]
        after = [text_of(round(100 + 200 * draw.gauss(-0.01, 0.1)), 100) for _ in range(count)]
        return compare(before, after)

    few = change(-0.01, -0.01 - 1.96 * 0.1 / 50**0.5, 0.02)  # over 50 requests
    enough = requests_enough(few, -0.03)
    assert enough is not None
    decided = sum(measured(enough).change.low > -0.03 for _ in range(100))
    assert 80 <= decided <= 98


def test_losses_that_are_allowed_once_do_not_add_up() -> None:
    """Each version loses 2% of the one before: the second is still allowed, the third is not."""
    lengths = [200 * 0.98**number for number in range(3)]
    versions = [[text_of(round(length - 100), 100)] * 40 for length in lengths]
    verdicts = []
    for number in (1, 2):
        base = compare(versions[number - 1], versions[number])
        first = compare(versions[0], versions[number])
        assert base.change.low > -SETTINGS.base_loss
        evidence = GOOD.model_copy(update={"base": base, "first": first})
        verdicts.append(decide(evidence, SETTINGS).verdict)
    assert verdicts == ["passed", "rejected"]


def test_every_broken_rule_is_reported() -> None:
    bad = GOOD.model_copy(
        update={
            "findings": [ERROR],
            "traffic": change(0.0, -0.1, 0.1),
            "base": change(-0.2, -0.3, -0.1),
            "base_by_source": {"code": change(-0.2, -0.3, -0.1)},
            "first": change(-0.3, -0.4, -0.2),
        }
    )
    rules = [reason.partition(":")[0] for reason in decide(bad, SETTINGS).reasons]
    assert rules == [
        "weights-not-finite",
        "traffic",
        "base",
        "base since version 1",
        "base, code",
    ]


def test_warnings_do_not_reject_a_candidate() -> None:
    assert decide(GOOD.model_copy(update={"findings": [WARNING]}), SETTINGS).passed


def test_an_insignificant_loss_on_one_source_does_not_reject() -> None:
    by_source = {"code": change(-0.05, -0.2, 0.1)}
    assert decide(GOOD.model_copy(update={"base_by_source": by_source}), SETTINGS).passed


def test_acceptance_length_is_over_all_steps() -> None:
    found = compare(
        [text("a", [0, 1]), text("a", [1, 1, 0, 0])], [text("a", [2, 1]), text("a", [1])]
    )
    assert found.before.value == pytest.approx(1.5)
    assert found.after.value == pytest.approx(1 + 4 / 3)
    assert found.change.value == pytest.approx((1 + 4 / 3) / 1.5 - 1)


def test_comparisons_are_paired() -> None:
    """Texts differ much from each other, which cancels as both drafters have the same texts."""
    before = [text("a", [number % 5] * 20) for number in range(40)]
    after = [text("a", [number % 5] * 19 + [min(4, number % 5 + 1)]) for number in range(40)]
    found = compare(before, after)
    assert found.before.high - found.before.low > 0.5
    assert found.change.high - found.change.low < 0.02


@pytest.mark.parametrize("seed", range(20))
def test_chance_alone_does_not_pass(seed: int) -> None:
    traffic = compare(drawn(seed, 1.2), drawn(seed + 1000, 1.2))
    assert traffic.change.low < SETTINGS.gain


def test_a_real_gain_passes() -> None:
    traffic = compare(drawn(1, 1.0, 400), drawn(2, 1.35, 400))
    assert traffic.change.low > SETTINGS.gain


def test_sources_are_compared_separately() -> None:
    before = [*drawn(1, 1.0, source="code"), *drawn(2, 1.0, source="chat")]
    after = [*drawn(1, 1.0, source="code"), *drawn(2, 0.4, source="chat")]
    found = compare_by_source(before, after)
    assert found["code"].change.value == 0
    assert found["chat"].change.high < -0.1


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.name)
def test_the_gate_decides_correctly_on_each_prepared_candidate(
    candidate: Candidate, world: World, tmp_path: Path
) -> None:
    trial = Trial(
        target=world.target,
        first=world.drafter,
        serving=world.drafter,
        candidate=candidate.make(world, tmp_path),
        held_out=newest_requests(),
        base=base_of(world),
        max_length=64,
        device=ALONE.device,
    )
    decision = decide(evaluate(trial, lossless_by_reference, Progress.silent()), SETTINGS)
    assert decision.passed is (not candidate.broken_rules), decision.reasons
    if candidate.broken_rules:
        for reason in decision.reasons:
            assert reason.startswith(candidate.broken_rules), decision.reasons
        for start in candidate.broken_rules:  # all of them, not only the first
            assert any(reason.startswith(start) for reason in decision.reasons), decision.reasons


def test_the_candidate_is_compared_with_the_serving_and_with_the_first_version(
    world: World, tmp_path: Path
) -> None:
    """The serving version has fallen far behind the first; a candidate like it is not let pass."""
    by_name = {candidate.name: candidate for candidate in CANDIDATES}
    fallen = by_name["better on new, broken on base"].make(world, tmp_path)
    trial = Trial(
        target=world.target,
        first=world.drafter,
        serving=fallen,
        candidate=fallen,
        held_out=newest_requests()[:4],
        base=base_of(world),
        max_length=64,
        device=ALONE.device,
    )
    evidence = evaluate(trial, lossless_by_reference, Progress.silent())
    assert evidence.base is not None
    assert evidence.first is not None
    assert evidence.base.change == Interval(value=0.0, low=0.0, high=0.0)
    assert evidence.first.change.high < -0.3
    reasons = decide(evidence, SETTINGS).reasons
    assert any(reason.startswith("base since version 1: ") for reason in reasons)
    assert not any(reason.startswith("base: ") for reason in reasons)


def test_the_overfitted_candidate_is_better_on_its_training_text(
    world: World, tmp_path: Path
) -> None:
    (overfitted,) = (each for each in CANDIDATES if each.name.startswith("overfitted"))
    drafters = [world.drafter, overfitted.make(world, tmp_path)]
    before, after = acceptance_by_drafter(
        world.target, drafters, overfitted_part(), 64, ALONE.device
    )
    assert compare(before, after).change.low > 0.3
