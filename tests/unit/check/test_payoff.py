"""Whether drafting pays is said only with measured costs, and apart from whether the pair fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_results import interval, offline, whole_result

from leadout.check.page import page
from leadout.check.payoff import payoff, pays_sentence, read_costs
from leadout.check.report import next_step, sentence
from leadout.check.result import CheckResult, Outcome
from leadout.control.tuned_file import Model, Tuned, write_tuned
from leadout.models import fingerprint
from leadout.settings import SettingsError
from support.pages import Reader
from support.tuned_files import a_tuning

COSTS = a_tuning([0.7, 0.5, 0.3])  # break-even with K = 1: 1.15 at 1 request, 1.9 at 16


def result(length: float, half: float = 0.05, costs: Tuned | None = COSTS) -> CheckResult:
    """An acceptance length that is the same with every K, so that K = 1 suits best."""
    measured = offline(length, half)
    lengths = [interval(length, half)] * 3
    measured = measured.model_copy(update={"by_draft_tokens": lengths})
    pays = None if costs is None else payoff(measured, costs)
    return whole_result(offline=measured, pays=pays)


@pytest.mark.parametrize(
    ("length", "half", "outcome"),
    [
        (1.40, 0.05, "pays"),
        (1.05, 0.05, "does not pay"),
        (1.15, 0.05, "undecided"),
        (1.40, 0.30, "undecided"),
    ],
)
def test_the_interval_is_compared_with_break_even(
    length: float, half: float, outcome: Outcome
) -> None:
    pays = result(length, half).pays
    assert pays is not None
    assert pays.outcome == outcome
    assert pays.loads[0].draft_tokens == 1
    assert pays.loads[0].break_even == pytest.approx(1.15)


def test_it_may_pay_at_low_load_only() -> None:
    found = result(1.5)
    assert found.pays is not None
    outcomes = [load.outcome for load in found.pays.loads]
    assert outcomes == ["pays", "pays", "pays", "undecided", "does not pay"]
    assert "It pays at these numbers of concurrent requests: 1, 2, 4; at 1 with K = 1" in sentence(
        found
    )


def test_the_best_k_of_each_load_is_compared() -> None:
    measured = offline().model_copy(
        update={"by_draft_tokens": [interval(1.7), interval(2.4), interval(2.6)]}
    )
    ks = [load.draft_tokens for load in payoff(measured, COSTS).loads]
    assert ks[0] > ks[-1]
    assert ks == sorted(ks, reverse=True)


def test_below_break_even_nothing_advises_to_serve_it() -> None:
    found = result(1.05)
    assert sentence(found).startswith("tiny-drafter fits tiny-target")
    assert "It does not pay at any measured load: at 1 with K = 1" in sentence(found)
    assert "break-even is 1.15" in sentence(found)
    assert next_step(found).startswith("serve without this drafter")
    assert "deploy" not in sentence(found).casefold()


def test_without_costs_the_command_that_measures_them_is_named() -> None:
    found = result(1.26, costs=None)
    command = "leadout tune owner/tiny-target drafters/tiny-drafter"
    assert f"`{command}`" in pays_sentence(found)
    assert next_step(found) == command
    assert "deploy" not in sentence(found).casefold()


def test_the_page_has_both_statements() -> None:
    text = Reader(page(result(1.05).judged([]))).text
    assert "fitsyes" in text
    assert "paysno" in text
    assert "paysnot known" in Reader(page(result(1.26, costs=None))).text


def test_costs_of_another_pair_are_refused(target: Path, drafter: Path, tmp_path: Path) -> None:
    sides = {
        "target": Model(name=str(target), fingerprint=fingerprint(target)),
        "drafter": Model(name=str(drafter), fingerprint=fingerprint(drafter)),
    }
    path = tmp_path / "tuned.json"
    write_tuned(COSTS.model_copy(update=sides), path)
    assert read_costs(path, str(target), str(drafter)).block_size == 4
    for role in sides:
        other = Model(name="another", fingerprint="0" * 64)
        write_tuned(COSTS.model_copy(update=sides | {role: other}), path)
        with pytest.raises(SettingsError, match=f"for the {role} another .*leadout tune"):
            read_costs(path, str(target), str(drafter))
