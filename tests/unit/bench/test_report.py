"""The terminal tables, the plan, the conclusion and the next command of a bench."""

from pathlib import Path

from rich.console import Console
from sample_rounds import BARE, BARE_AGAIN, FIXED, TUNED, drifting_rate, measured, setup

from leadout.bench.report import (
    conclusion,
    mean_heads,
    mean_rows,
    method,
    next_command,
    print_plan,
    print_result,
)
from leadout.bench.results import BenchResult, summarize
from leadout.bench.settings import BenchSettings
from leadout.bench.setup import make_plan
from leadout.provenance import Provenance

SETUP = setup()
SLOWER = summarize(SETUP, measured(SETUP, drifting_rate(0.8)), Provenance.of_this_run())


def test_tables_have_ascending_concurrency(result: BenchResult) -> None:
    console = Console(record=True, width=160)
    print_result(result, console)
    lines = console.export_text().splitlines()
    rows = [line.split() for line in lines if "1.25x" in line]
    # Two sets, then the means.
    assert [row[0] for row in rows] == ["1", "8", "1", "8", "1", "8"]
    assert "1.25x (1.25-1.25)" in lines[next(n for n, line in enumerate(lines) if "1.25x" in line)]
    assert any("2.50" in line for line in lines)


def test_the_error_of_the_method_stands_before_the_arms(result: BenchResult) -> None:
    assert mean_heads(result) == ["conc.", "A/A: bare again", "CPU", "fixed", "CPU"]
    assert mean_rows(result)[0] == ["1", "1.00x (1.00-1.00)", "1.00", "1.25x (1.25-1.25)", "1.25"]


def test_the_method_names_turns_and_lengths(result: BenchResult) -> None:
    assert "Every request generates 64 tokens" in method(result)
    assert "slices of a quarter of a second" in method(result)
    changes = {"stop_at_end_of_text": True, "turns": "single"}
    other = result.model_copy(update={"settings": result.settings.model_copy(update=changes)})
    assert "Requests end at the end of text, or after 64 tokens." in method(other)
    assert "One server is up at a time" in method(other)


def test_the_plan_says_how_servers_take_turns() -> None:
    console = Console(record=True, width=120)
    print_plan(make_plan(setup(arms=(BARE, BARE_AGAIN, FIXED, TUNED)), []), console)
    shown = console.export_text()
    assert "96 (0 already measured)" in shown
    assert "take turns in slices" in shown
    assert "about 7 minutes, plus 4 starts of a server" in shown


def test_the_conclusion_names_where_drafting_pays(result: BenchResult) -> None:
    expected = "Faster than bare vLLM, 95% interval above 1: fixed at concurrency 1, 8."
    assert conclusion(result) == expected
    assert "serve without this drafter" in conclusion(SLOWER)


def test_the_next_command_follows_from_the_outcome(result: BenchResult) -> None:
    plain = BenchSettings(target="t", draft=("d",))
    tuned = BenchSettings(target="t", draft=("d",), tuned=Path("f.json"))
    assert next_command(plain, result) == "leadout tune t d"
    assert next_command(tuned, result) == "leadout serve t --draft d --tuned f.json"
    assert next_command(tuned, SLOWER) == "leadout serve t"
