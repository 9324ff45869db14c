"""The files, tables, page and conclusion of a bench."""

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from sample_rounds import BARE, FIXED, TUNED, accepted, drifting_rate, measured, setup

from leadout.bench.report import (
    MEANS,
    conclusion,
    next_command,
    page,
    print_plan,
    print_result,
    write_files,
)
from leadout.bench.results import BenchResult, summarize
from leadout.bench.settings import BenchSettings
from leadout.bench.setup import Rates, make_plan
from support.pages import HOSTILE, assert_hostile_text_is_escaped, assert_loads_nothing

SETUP = setup()


@pytest.fixture(scope="module")
def result() -> BenchResult:
    rounds = measured(
        SETUP,
        drifting_rate(1.25),
        lambda cell: accepted(100, 150) if cell.arm == "fixed" else None,
    )
    return summarize(SETUP, rounds)


def test_files_have_the_same_numbers(result: BenchResult, tmp_path: Path) -> None:
    paths = write_files(result, tmp_path)
    assert [path.name for path in paths] == [
        "results.json",
        "results.csv",
        "report.html",
        "speedup.svg",
    ]
    assert BenchResult.model_validate_json(paths[0].read_text()) == result
    cells = json.loads(paths[0].read_text())["cells"]
    with paths[1].open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == len(cells) == 8
    for row, cell in zip(rows, cells, strict=True):
        assert (row["prompt_set"], row["arm"]) == (cell["prompt_set"], cell["arm"])
        assert row["speedup"] == ("" if cell["speedup"] is None else str(cell["speedup"]))
    picture = ElementTree.fromstring(paths[3].read_text())
    text = "".join(picture.itertext())
    assert MEANS in text
    assert "Speed-up by prompt set at concurrency 1" in text


def test_bare_vllm_alone_has_no_speedup_chart(tmp_path: Path) -> None:
    given = setup(arms=(BARE,))
    alone = summarize(given, measured(given, lambda cell: 10.0))
    assert [path.name for path in write_files(alone, tmp_path)] == [
        "results.json",
        "results.csv",
        "report.html",
    ]
    print_result(alone, Console(record=True))


def test_the_page_has_every_chart_and_loads_nothing(result: BenchResult) -> None:
    text = page(result)
    # Means, two sets, acceptance, latency at two concurrencies.
    assert text.count('<svg class="chart"') == 6
    for title in ("speed-up on math", "acceptance by position", "latency at concurrency 8"):
        assert f'aria-label="{title}"' in text
    assert_loads_nothing(text)


def test_names_are_escaped_in_the_page() -> None:
    given = setup(sets=(HOSTILE,))
    assert_hostile_text_is_escaped(page(summarize(given, measured(given, drifting_rate(1.1)))))


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
