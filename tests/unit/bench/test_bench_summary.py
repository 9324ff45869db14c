"""From rounds to the result, its files, its tables and its page."""

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from sample_rounds import BARE, FIXED, TUNED, accepted, drifting_rate, measured, settings

from leadout.bench.report import MEANS, page, print_plan, print_result, write_files
from leadout.bench.results import BenchResult, summarize
from leadout.bench.settings import Rates, make_plan
from support.pages import HOSTILE, assert_hostile_text_is_escaped, assert_loads_nothing

GIVEN = settings()


@pytest.fixture(scope="module")
def result() -> BenchResult:
    rounds = measured(
        GIVEN,
        drifting_rate(1.25),
        lambda cell: accepted(100, 150) if cell.arm == "fixed" else None,
    )
    return summarize(GIVEN, rounds)


def test_a_drifting_machine_does_not_move_the_speedup(result: BenchResult) -> None:
    for cell in result.cells:
        if cell.arm == "bare":
            assert cell.speedup is None
            assert cell.speedup_spread is None
        else:
            assert cell.speedup_spread is not None
            assert cell.speedup == pytest.approx(1.25)
            assert cell.speedup_spread.high - cell.speedup_spread.low < 1e-9
        # The speeds themselves have drifted.
        assert cell.tokens_per_second.low < 0.7 * cell.tokens_per_second.high


def test_means_are_over_sets_by_concurrency(result: BenchResult) -> None:
    assert [(mean.concurrency, mean.arm) for mean in result.geometric_means] == [
        (1, "fixed"),
        (8, "fixed"),
    ]
    assert result.geometric_means[0].speedup == pytest.approx(1.25)
    assert result.geometric_means[0].speedup_spread.rounds == 3


def test_acceptance_and_latency_are_pooled_over_rounds(result: BenchResult) -> None:
    cell = result.cell("math", 8, "fixed")
    bare = result.cell("math", 8, "bare")
    assert cell is not None
    assert bare is not None
    assert cell.acceptance_length == pytest.approx(2.5)
    assert cell.acceptance_by_position == pytest.approx([0.75, 0.375, 0.1875, 0.09375])
    assert bare.acceptance_length is None
    assert bare.acceptance_by_position == []
    assert cell.ttft.median == pytest.approx(100.0)
    assert cell.tpot.median < cell.tpot.p99
    assert [each.round for each in cell.rounds] == [0, 1, 2]
    assert len(cell.rounds[0].tpot_ms) == 16


def test_half_a_bench_is_summed_up_as_far_as_it_goes() -> None:
    rounds = measured(GIVEN, drifting_rate(1.25))
    # Killed when only bare vLLM had been measured.
    only = summarize(GIVEN, rounds[:1])
    assert [cell.arm for cell in only.cells] == ["bare"]
    assert only.geometric_means == []


def test_no_folder_of_this_machine_is_told(result: BenchResult) -> None:
    text = result.model_dump_json()
    assert "/some/folder" not in text
    assert result.settings.target == "target"


def test_files_hold_the_same_numbers(result: BenchResult, tmp_path: Path) -> None:
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


def test_a_bench_of_bare_vllm_alone_has_no_speedup_to_draw(tmp_path: Path) -> None:
    given = settings(arms=(BARE,))
    alone = summarize(given, measured(given, lambda cell: 10.0))
    assert [path.name for path in write_files(alone, tmp_path)] == [
        "results.json",
        "results.csv",
        "report.html",
    ]
    print_result(alone, Console(record=True))


def test_the_page_has_every_plot_and_loads_nothing(result: BenchResult) -> None:
    text = page(result)
    # Means, two sets, acceptance, latency at two concurrencies.
    assert text.count('<svg class="chart"') == 6
    for title in ("speed-up on math", "acceptance by position", "latency at concurrency 8"):
        assert f'aria-label="{title}"' in text
    assert_loads_nothing(text)


def test_names_are_escaped_in_the_page() -> None:
    given = settings(sets=(HOSTILE,))
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


def test_the_plan_says_where_its_speed_is_from() -> None:
    console = Console(record=True, width=120)
    given = settings(arms=(BARE, FIXED, TUNED))
    print_plan(make_plan(given, [], Rates({1: 30.0, 8: 100.0}, "a probe of bare vLLM")), console)
    shown = console.export_text()
    assert "a probe of bare vLLM" in shown
    assert "36 (0 already measured)" in shown
    assert "30 at 1, 100 at 8" in shown
