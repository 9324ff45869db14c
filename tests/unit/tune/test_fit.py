"""The fits recover known costs and acceptance from noisy measurements."""

import random

import pytest

from leadout.engine.calibration import Gained, Prefill, RoundResult, StepTime, Turn
from leadout.engine.step_records import draft_lengths
from leadout.tune.fit import StepLaw, fit_acceptance, fit_prefill, fit_steps
from leadout.tune.settings import TuneError

BARE = 0.050
COUNTS = (0, 1, 2, 3, 5)
EASY, HARD = 0.95, 0.3
TOKENS, DRAFTS = 40, (0, 1, 3, 5)


def verify(v: int) -> float:
    return 0.050 + 0.004 * v


def draft(k: int) -> float:
    return 0.006 + 0.0015 * k


def timings(
    seed: int, *, noise: float = 0.05, outliers: float = 0.05, turns: int = 5
) -> list[Turn]:
    """Turns of both engines on a machine that drifts and is disturbed now and then."""
    dice = random.Random(seed)
    found = []
    for k in COUNTS:
        lengths, before = draft_lengths(k), 0
        for _ in range(turns):
            slowness = dice.choice([1.0, 1.0, 1.1, 1.6])

            def seconds(law: float, slowness: float = slowness) -> float:
                hit = dice.uniform(1.5, 4) if dice.random() < outliers else 1.0
                return law * slowness * hit * dice.lognormvariate(0, noise)

            bare = [seconds(BARE) for _ in range(3)]
            steps = []
            for _ in range(6):
                after = next(lengths)
                took = seconds(verify(before) + draft(after))
                steps.append(StepTime(verified=before, drafted=after, seconds=took))
                before = after
            found.append(Turn(bare=bare, steps=steps))
    return found


def relative_error(law: StepLaw, k: int) -> float:
    truth = (verify(k) + draft(k)) / BARE
    return law.step(k).values[0].item() / truth - 1


def test_without_noise_the_costs_are_exact() -> None:
    law = fit_steps(timings(0, noise=0, outliers=0))
    assert law.verify[0].interval().value == 1
    for k in COUNTS:
        assert law.verify[k].values[0].item() == pytest.approx(verify(k) / BARE)
        assert law.draft[k].values[0].item() == pytest.approx(draft(k) / BARE)
        interval = law.step(k).interval()
        assert interval.low == pytest.approx(interval.high)


def test_noise_drift_and_outliers_change_the_costs_little() -> None:
    laws = [fit_steps(timings(seed)) for seed in range(20)]
    errors = [relative_error(law, k) for law in laws for k in COUNTS]
    assert max(map(abs, errors)) < 0.12
    assert abs(sum(errors) / len(errors)) < 0.02


def test_means_instead_of_medians_would_fail() -> None:
    # Guards the test above: the disturbance is large enough to spoil a fit by means.
    turns = timings(0, outliers=0.1, turns=40)
    slow = [s.seconds for turn in turns for s in turn.steps if (s.verified, s.drafted) == (5, 5)]
    assert sum(slow) / len(slow) > 1.2 * (verify(5) + draft(5))
    assert abs(relative_error(fit_steps(turns), 5)) < 0.03


def test_cost_intervals_cover_the_truth() -> None:
    covered = 0
    for seed in range(40):
        law = fit_steps(timings(seed), seed=seed)
        for k in (1, 3, 5):
            interval = law.step(k).interval()
            covered += interval.low <= (verify(k) + draft(k)) / BARE <= interval.high
    assert covered >= 0.85 * 120  # few turns make bootstrap intervals somewhat narrow


def test_turns_without_a_full_batch_are_refused() -> None:
    with pytest.raises(TuneError, match="lower --max-batch"):
        fit_steps([Turn(bare=[], steps=[])])


def test_most_steps_draft_k_tokens() -> None:
    lengths = draft_lengths(3)
    drafted = [next(lengths) for _ in range(50)]
    assert drafted.count(3) == 40
    assert drafted.count(0) == 10


def test_prefill_is_a_line_through_noisy_steps() -> None:
    dice = random.Random(0)
    steps = [
        Prefill(tokens=n, seconds=(0.02 + 0.0005 * n) * dice.lognormvariate(0, 0.02))
        for n in range(40, 1200, 40)
    ]
    steps.append(Prefill(tokens=600, seconds=9.0))
    law = fit_prefill(steps)
    assert law.per_token == pytest.approx(0.0005, rel=0.05)
    assert law.seconds(500) == pytest.approx(0.27, rel=0.05)


def test_prefill_of_one_length_has_no_slope() -> None:
    law = fit_prefill([Prefill(tokens=10, seconds=0.1), Prefill(tokens=10, seconds=0.3)])
    assert (law.base, law.per_token) == (pytest.approx(0.2), 0)


def test_a_slow_bare_server_does_not_make_drafts_look_free() -> None:
    turns = [
        turn.model_copy(update={"bare": [1.4 * seconds for seconds in turn.bare]})
        for turn in timings(0, noise=0, outliers=0)
    ]
    law = fit_steps(turns)
    idle = verify(0) + draft(0)
    assert law.draft[0].values[0].item() == pytest.approx(0, abs=1e-9)
    for k in COUNTS[1:]:
        step = verify(k) + draft(k)
        assert law.step(k).values[0].item() == pytest.approx(step / idle)
        # Compared with the bare server alone, the drafts would seem to cost nothing.
        assert step / (1.4 * BARE) < step / idle


def test_the_cost_of_drafting_is_never_negative() -> None:
    steps = [StepTime(verified=0, drafted=0, seconds=0.9 * BARE)] * 6
    law = fit_steps([Turn(bare=[BARE] * 3, steps=steps)] * 4)
    assert law.draft[0].interval().low == 0
    assert law.step(0).interval().value == 1


def gained(prompt: int, probability: float, k: int, dice: random.Random) -> Gained:
    """One request: steps until it has all its tokens."""
    tokens: list[int] = []
    while sum(tokens) < TOKENS:
        accepted = 0
        while accepted < k and dice.random() < probability:
            accepted += 1
        tokens.append(1 + accepted)
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
        for k in DRAFTS
    ]


def expected_length(probability: float, k: int) -> float:
    return sum(probability**n for n in range(k + 1))


def test_texts_are_weighted_by_tokens_not_by_steps() -> None:
    found = fit_acceptance(rounds(400))
    for k in DRAFTS[1:]:
        # Half of the tokens are easy; a server's tokens divided by its steps.
        truth = 2 / (1 / expected_length(EASY, k) + 1 / expected_length(HARD, k))
        assert found.tokens[k].values[0].item() == pytest.approx(truth, rel=0.04)
    assert found.tokens[0].interval().high == 1


def test_acceptance_intervals_over_prompts_cover_the_truth() -> None:
    truth = 2 / (1 / expected_length(EASY, 5) + 1 / expected_length(HARD, 5))
    covered, widths = 0, []
    for seed in range(30):
        interval = fit_acceptance(rounds(40, seed)).tokens[5].interval()
        covered += interval.low <= truth * 1.02 and truth <= interval.high
        widths.append(interval.high - interval.low)
    assert covered >= 26
    assert fit_acceptance(rounds(400)).tokens[5].interval().high < truth + min(widths)


def test_acceptance_by_position_is_for_the_largest_k() -> None:
    found = fit_acceptance([one_round(3, [Gained(prompt=0, tokens=[1, 2, 4, 4])])])
    assert [each.values[0].item() for each in found.by_position] == [0.75, 0.5, 0.5]
    assert (found.requests, found.steps) == (1, 4)
    assert found.tokens[3].values[0].item() == pytest.approx(11 / 4)
