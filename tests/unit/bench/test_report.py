"""The terminal tables, the plan, the conclusion and the next command of a bench."""

from pathlib import Path

from rich.console import Console
from sample_rounds import BARE, FIXED, TUNED, drifting_rate, measured, setup

from leadout.bench.report import conclusion, next_command, print_plan, print_result
from leadout.bench.results import BenchResult, summarize
from leadout.bench.settings import BenchSettings
from leadout.bench.setup import Rates, make_plan

SETUP = setup()


def test_tables_have_ascending_concurrency(result: BenchResult) -> None:
    console = Console(record=True, width=160)
    print_result(result, console)
    lines = console.export_text().splitlines()
    rows = [line.split() for line in lines if "1.25x" in line]
    # Two sets, then the means.
    assert [row[0] for row in rows] == ["1", "8", "1", "8", "1", "8"]
    assert "1.25x (1.25-1.25)" in lines[next(n for n, line in enumerate(lines) if "1.25x" in line)]
    assert any("2.50" in line for line in lines)


def test_the_plan_names_the_source_of_its_rates() -> None:
    console = Console(record=True, width=120)
    given = setup(arms=(BARE, FIXED, TUNED))
    print_plan(make_plan(given, [], Rates({1: 30.0, 8: 100.0}, "a probe of bare vLLM")), console)
    shown = console.export_text()
    assert "a probe of bare vLLM" in shown
    assert "36 (0 already measured)" in shown
    assert "30 at 1, 100 at 8" in shown


def test_the_conclusion_names_where_drafting_pays(result: BenchResult) -> None:
    expected = "Faster than bare vLLM, 95% interval above 1: fixed at concurrency 1, 8."
    assert conclusion(result) == expected
    slower = summarize(SETUP, measured(SETUP, drifting_rate(0.8)))
    assert "serve without this drafter" in conclusion(slower)


def test_the_next_command_follows_from_the_outcome(result: BenchResult) -> None:
    slower = summarize(SETUP, measured(SETUP, drifting_rate(0.8)))
    plain = BenchSettings(target="t", draft=("d",))
    tuned = BenchSettings(target="t", draft=("d",), tuned=Path("f.json"))
    assert next_command(plain, result) == "leadout tune t d"
    assert next_command(tuned, result) == "leadout serve t --draft d --tuned f.json"
    assert next_command(tuned, slower) == "leadout serve t"
