"""The page, the chart and the other files of a bench have its numbers and load nothing."""

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from sample_rounds import BARE, BARE_AGAIN, drifting_rate, measured, setup

from leadout.bench.page import page, write_files
from leadout.bench.report import MEANS, print_result
from leadout.bench.results import BenchResult, summarize
from leadout.provenance import Provenance
from support.pages import HOSTILE, assert_hostile_text_is_escaped, assert_loads_nothing


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
    assert len(rows) == len(cells) == 12
    for row, cell in zip(rows, cells, strict=True):
        assert (row["prompt_set"], row["arm"]) == (cell["prompt_set"], cell["arm"])
        assert row["speedup"] == ("" if cell["speedup"] is None else str(cell["speedup"]))
    picture = ElementTree.fromstring(paths[3].read_text())
    text = "".join(picture.itertext())
    assert MEANS in text
    assert "Speed-up by prompt set at concurrency 1" in text


def test_bare_vllm_alone_has_no_speedup_chart(tmp_path: Path) -> None:
    given = setup(arms=(BARE, BARE_AGAIN))
    alone = summarize(given, measured(given, lambda cell: 10.0), Provenance.of_this_run())
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
    found = summarize(given, measured(given, drifting_rate(1.1)), Provenance.of_this_run())
    assert_hostile_text_is_escaped(page(found))
