"""The cost model's predictions, compared with times computed by hand."""

import pytest
from sample_rounds import BARE, BARE_AGAIN, FIXED, TUNED, accepted, measured, setup

from leadout.bench.predict import CostModel, Served, bare_rate, predicted_speedup, share_close
from leadout.bench.results import summarize
from leadout.bench.setup import Cell
from leadout.control.cost_model import StepCosts
from leadout.control.tuned_file import PrefillLaw
from leadout.provenance import Provenance

# A bare step takes 10 ms at any batch; verifying 4 drafts 2 ms more, drafting 3 ms.
COSTS = StepCosts(
    verify={1: {0: 0.010, 4: 0.012}, 8: {0: 0.010, 4: 0.030}},
    draft={1: {0: 0.001, 4: 0.003}, 8: {0: 0.001, 4: 0.010}},
)
FREE = PrefillLaw(base=0.0, per_token=0.0)


def model(
    prefill: PrefillLaw = FREE, table: tuple[tuple[int, int, int], ...] = ((1, 4, 4), (5, 8, 0))
) -> CostModel:
    return CostModel("some/drafter", COSTS, prefill, prefill, table)


def test_without_prefill_the_speedup_is_tokens_over_cost_of_a_step() -> None:
    served = Served(concurrency=1, prompt_tokens=100, output_tokens=65)
    assert bare_rate(model(), served) == pytest.approx(65 / (64 * 0.010))
    assert predicted_speedup(model(), served, 4, 3.0) == pytest.approx(3.0 * 0.010 / 0.015)


def test_prefill_that_both_pay_pulls_the_speedup_to_one() -> None:
    served = Served(concurrency=1, prompt_tokens=1000, output_tokens=65)
    slow = model(PrefillLaw(base=0.02, per_token=0.001))
    bare = 0.02 + 1.0 + 64 * 0.010
    drafting = 0.02 + 1.0 + 64 * 0.015 / 3.0
    assert predicted_speedup(slow, served, 4, 3.0) == pytest.approx(bare / drafting)


def test_a_step_without_drafts_costs_the_upkeep_of_the_drafter() -> None:
    served = Served(concurrency=8, prompt_tokens=0, output_tokens=65)
    assert predicted_speedup(model(), served, 0, 3.0) == pytest.approx(0.010 / 0.011)


def test_draft_lengths_come_from_the_arm_or_the_table() -> None:
    assert model().draft_tokens(FIXED, 8) == 4
    assert [model().draft_tokens(TUNED, batch) for batch in (1, 4, 5, 8, 32)] == [4, 4, 0, 0, 0]


def test_the_model_covers_its_own_drafter_only() -> None:
    other = FIXED.model_copy(update={"drafter": "another"})
    assert model().covers(FIXED)
    assert model().covers(TUNED.model_copy(update={"drafter": None}))
    assert not model().covers(other)
    assert not model().covers(BARE)


def test_a_prediction_is_correct_within_15_percent() -> None:
    assert share_close([(1.0, 1.0), (1.14, 1.0), (1.16, 1.0), (0.84, 1.0)]) == 0.5


def test_cells_carry_predictions_from_their_own_acceptance() -> None:
    given = setup(arms=(BARE, BARE_AGAIN, FIXED, TUNED), sets=("math",), rounds=2)

    def rate(cell: Cell) -> float:
        speeds = {"bare": 100.0, "bare-again": 100.0, "fixed": 200.0, "tuned": 150.0}
        return speeds[cell.arm] * cell.concurrency

    rounds = measured(given, rate, lambda cell: accepted(100, 200))  # acceptance length 3
    result = summarize(given, rounds, Provenance.of_this_run(), model(FREE))
    fixed = result.cell("math", 1, "fixed")
    assert fixed is not None
    assert fixed.predicted_speedup == pytest.approx(2.0)
    tuned = result.cell("math", 8, "tuned")
    assert tuned is not None
    assert tuned.predicted_speedup == pytest.approx(0.010 / 0.011)
    bare = result.cell("math", 1, "bare")
    assert bare is not None
    assert bare.predicted_speedup is None
    # Right: both at concurrency 1 and `fixed` there; wrong: both at 8 and `tuned` at 1.
    assert result.prediction is not None
    assert result.prediction.cells == 4
    assert result.prediction.within_15_percent == 0.25


def test_a_table_that_never_drafts_is_served_bare() -> None:
    given = setup(arms=(BARE, BARE_AGAIN, TUNED), sets=("math",), rounds=1)
    rounds = measured(given, lambda cell: 50.0)
    result = summarize(given, rounds, Provenance.of_this_run(), model(table=((1, 8, 0),)))
    tuned = result.cell("math", 8, "tuned")
    assert tuned is not None
    assert tuned.predicted_speedup == 1.0
