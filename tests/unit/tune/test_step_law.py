"""The fit finds the law that made the timings, whatever disturbs some of them."""

import random

import pytest

from leadout.engine.calibration import Prefill, StepTime, Turn, draft_lengths
from leadout.tune.fit import StepLaw, fit_prefill, fit_steps
from leadout.tune.settings import TuneError

BARE = 0.050
COUNTS = (0, 1, 2, 3, 5)


def verify(v: int) -> float:
    return 0.050 + 0.004 * v


def draft(k: int) -> float:
    return 0.006 + 0.0015 * k


def timings(
    seed: int, *, noise: float = 0.05, outliers: float = 0.05, turns: int = 5
) -> list[Turn]:
    """Turns as the engines take them, on a machine that drifts and is now and then disturbed."""
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


def test_without_noise_the_law_is_found_exactly() -> None:
    law = fit_steps(timings(0, noise=0, outliers=0))
    assert law.verify[0].interval().value == 1
    for k in COUNTS:
        assert law.verify[k].values[0].item() == pytest.approx(verify(k) / BARE)
        assert law.draft[k].values[0].item() == pytest.approx(draft(k) / BARE)
        interval = law.step(k).interval()
        assert interval.low == pytest.approx(interval.high)


def test_noise_drift_and_outliers_move_the_law_little() -> None:
    errors = [relative_error(fit_steps(timings(seed)), k) for seed in range(20) for k in COUNTS]
    assert max(map(abs, errors)) < 0.12
    assert abs(sum(errors) / len(errors)) < 0.02


def test_the_mean_would_not_have_done() -> None:
    # Guards the test above: the disturbance is large enough to spoil a fit by means.
    turns = timings(0, outliers=0.1, turns=40)
    slow = [s.seconds for turn in turns for s in turn.steps if (s.verified, s.drafted) == (5, 5)]
    assert sum(slow) / len(slow) > 1.2 * (verify(5) + draft(5))
    assert abs(relative_error(fit_steps(turns), 5)) < 0.03


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    covered = 0
    for seed in range(40):
        law = fit_steps(timings(seed), seed=seed)
        for k in (1, 3, 5):
            interval = law.step(k).interval()
            covered += interval.low <= (verify(k) + draft(k)) / BARE <= interval.high
    assert covered >= 0.85 * 120  # few turns make bootstrap intervals somewhat narrow


def test_turns_without_a_full_batch_are_refused() -> None:
    with pytest.raises(TuneError, match="wanted some; lower --max-batch"):
        fit_steps([Turn(bare=[], steps=[])])


def test_most_steps_verify_what_a_server_with_one_length_would() -> None:
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


def test_noise_never_makes_drafting_cost_less_than_nothing() -> None:
    steps = [StepTime(verified=0, drafted=0, seconds=0.9 * BARE)] * 6
    law = fit_steps([Turn(bare=[BARE] * 3, steps=steps)] * 4)
    assert law.draft[0].interval().low == 0
    assert law.step(0).interval().value == 1
