"""The gate: each rule works alone, all broken rules are reported, and chance does not pass."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from leadout.check.result import Divergence, Lossless
from leadout.console import Progress
from leadout.dflash.generate import generate
from leadout.engine.offline import SessionRequest, SessionResult, SetRun
from leadout.evaluate import acceptance
from leadout.evaluate.acceptance import TextAcceptance, acceptance_by_drafter
from leadout.findings import Finding, Severity
from leadout.learn import gate
from leadout.learn.config import CycleSettings
from leadout.learn.gate import (
    Comparison,
    Evidence,
    Trial,
    as_served,
    check_lossless,
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
from support.learn_world import ALONE, NEW, World, lossless_by_reference, requests
from support.tiny_data import loaded

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


def test_the_expectation_of_servers_counts_requests_as_they_do() -> None:
    """A long answer counts as one request, and low answers are counted."""
    short, long = text("traffic", [3] * 10), text("traffic", [0] * 1000)
    found = as_served([short] * 30 + [long] * 10)
    assert found is not None
    assert 1 < found.low < found.length < 4
    assert found.length > 1.7  # over all steps it is 1.1
    assert 0 < found.low_share < 0.25
    assert as_served([short]) is None


def text_of(accepted: int, steps: int, source: str = "a") -> TextAcceptance:
    return text(source, [accepted // steps + (place < accepted % steps) for place in range(steps)])


def test_a_good_candidate_passes_with_its_numbers_as_reasons() -> None:
    decision = decide(GOOD, SETTINGS)
    assert decision.passed
    assert "+20.0% (95% interval +15.0% to +25.0%) over 50 requests" in decision.reasons[0]


def test_a_check_that_was_left_out_is_no_check_that_is_missing() -> None:
    left_out = {"lossless": None, "lossless_left_out": "because there is no target"}
    decision = decide(GOOD.model_copy(update=left_out), SETTINGS)
    assert decision.passed
    assert decision.reasons[-1] == "lossless: left out, because there is no target"
    unmeasured = GOOD.model_copy(update={**left_out, "traffic": None})
    assert decide(unmeasured, SETTINGS).reasons == ["traffic: not measured"]
    unfit = Evidence(findings=[ERROR])
    assert decide(unfit, SETTINGS).reasons == ["weights-not-finite: NaN"]


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


def test_enough_requests_decide_nine_times_of_ten(nightly: bool) -> None:
    """In simulation: the true loss is 1%, and the deviation of a text 10%."""
    draw = random.Random(3)

    def measured(count: int) -> Comparison:
        before = [text_of(100, 100) for _ in range(count)]
        after = [text_of(round(100 + 200 * draw.gauss(-0.01, 0.1)), 100) for _ in range(count)]
        return compare(before, after)

    few = change(-0.01, -0.01 - 1.96 * 0.1 / 50**0.5, 0.02)  # over 50 requests
    enough = requests_enough(few, -0.03)
    assert enough is not None
    count = 100 if nightly else 30
    decided = sum(measured(enough).change.low > -0.03 for _ in range(count))
    assert 0.8 * count <= decided <= 0.98 * count


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


Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make(world: World, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes a candidate by its name, once."""
    by_name = {candidate.name: candidate for candidate in CANDIDATES}
    return cache(lambda name: by_name[name].make(world, tmp_path_factory.mktemp("candidate")))


def _marked(candidate: Candidate) -> Any:
    # They break the rules that others break as well.
    is_repeated = candidate.name in {"slightly worse", "random"}
    return pytest.param(
        candidate, id=candidate.name, marks=pytest.mark.nightly if is_repeated else ()
    )


@pytest.mark.parametrize("candidate", map(_marked, CANDIDATES))
def test_the_gate_decides_correctly_on_each_prepared_candidate(
    candidate: Candidate, world: World, make: Make
) -> None:
    trial = Trial(
        target=world.target,
        first=world.drafter,
        serving=world.drafter,
        candidate=make(candidate.name),
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
    world: World, make: Make
) -> None:
    """The serving version has fallen far behind the first; a candidate like it is not let pass."""
    fallen = make("better on new, broken on base")
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


def test_a_server_that_the_gate_starts_gets_the_flags_of_vllm(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def fake_reference(*_: object, **settings: Any) -> None:
        asked.update(settings)
        raise InterruptedError

    monkeypatch.setattr(acceptance, "reference_target", fake_reference)
    monkeypatch.setattr(acceptance, "why_not_loaded", lambda *_: "its weights are quantized")
    flags = ("--tensor-parallel-size", "2")
    trial = Trial(
        target=world.target,
        first=world.drafter,
        serving=world.drafter,
        candidate=world.drafter,
        held_out=newest_requests()[:4],
        base=base_of(world),
        max_length=64,
        device=ALONE.device,
        vllm_flags=flags,
    )
    with pytest.raises(InterruptedError):
        evaluate(trial, lossless_by_reference, Progress.silent())
    assert (asked["served"], asked["vllm_flags"]) == (True, flags)


@pytest.mark.parametrize(
    ("flags", "dtype"), [((), "float32"), (("--quantization", "fp8"), "bfloat16")]
)
def test_texts_are_compared_in_a_precision_that_the_target_has_kernels_for(
    world: World, flags: tuple[str, ...], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SessionRequest] = []

    def answer(request: SessionRequest) -> SessionResult:
        asked.append(request)
        run = SetRun(
            prompt_set="held out", temperature=0, answers=[[7]], steps=1, accepted_by_position=[]
        )
        return SessionResult(runs=[run])

    monkeypatch.setattr(gate, "run_session", answer)
    monkeypatch.setattr(gate, "served_dtype", lambda *_: "bfloat16")
    found = check_lossless(world.target, world.drafter, newest_requests()[:1], (), flags)
    assert (found.texts, found.equal_texts) == (1, 1)
    assert [each.dtype for each in asked] == [dtype, dtype]


def test_the_overfitted_candidate_is_better_on_its_training_text(world: World, make: Make) -> None:
    drafters = [world.drafter, make("overfitted to the training part")]
    before, after = acceptance_by_drafter(
        world.target, drafters, overfitted_part(), 64, ALONE.device
    )
    assert compare(before, after).change.low > 0.3


def test_a_changed_answer_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter cannot change answers, so here one of them is changed.

    They are the reference's; tests/engine/test_learn.py compares those of vLLM.
    """

    def fake_session(request: SessionRequest) -> SessionResult:
        ((name, prompts),) = request.prompts.items()
        found = generate(loaded(world.target), None, prompts, max_new_tokens=request.max_tokens)
        answers = [list(each.tokens) for each in found]
        if request.drafter is not None:
            answers[1][5] = (answers[1][5] + 1) % 250
        run = SetRun(
            prompt_set=name, temperature=0.0, answers=answers, steps=0, accepted_by_position=[]
        )
        return SessionResult(runs=[run])

    monkeypatch.setattr(gate, "run_session", fake_session)
    found = check_lossless(world.target, world.drafter, requests(NEW, 4))
    assert (found.texts, found.equal_texts) == (4, 3)
    assert found.divergences[0].position == 5
    assert found.divergences[0].logit_gap > 0
