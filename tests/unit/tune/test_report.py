"""The verdict, the terminal table, the page and the command to run next."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from leadout.control.tuned_file import Tuned
from leadout.tune.report import (
    CHOSEN,
    NO_GAIN,
    next_command,
    overhead_warning,
    page,
    print_tuned,
    verdict,
)
from support.pages import HOSTILE, Reader, assert_hostile_text_is_escaped, assert_loads_nothing
from support.tuned_files import a_tuning

GOOD, USELESS = a_tuning([0.9, 0.85, 0.8, 0.8]), a_tuning([0.02, 0.0, 0.0, 0.0])
FILE = Path("tuned.json")


def with_table(tuned: Tuned, table: list[tuple[int, int, int]], loses_above: int | None) -> Tuned:
    return tuned.model_copy(update={"table": table, "loses_above": loses_above})


@pytest.mark.parametrize(
    ("table", "loses_above", "expected"),
    [
        (
            [(1, 3, 4), (4, 8, 2), (9, 16, 0)],
            8,
            "draft 4 tokens up to 3 concurrent requests, 2 up to 8, none above: speculation is "
            "slower above 8",
        ),
        (
            [(1, 1, 2), (2, 16, 1)],
            None,
            "draft 2 tokens up to 1 concurrent request, 1 above: speculation is faster at every "
            "batch size up to the measured 16",
        ),
        (
            [(1, 16, 1)],
            None,
            "draft 1 token at every batch size: speculation is faster at every batch size up to "
            "the measured 16",
        ),
        ([(1, 16, 0)], 0, NO_GAIN),
    ],
)
def test_verdict_is_one_sentence(
    table: list[tuple[int, int, int]], loses_above: int | None, expected: str
) -> None:
    assert verdict(with_table(GOOD, table, loses_above)) == expected


def test_overhead_of_an_idle_drafter_is_reported() -> None:
    idle = with_table(a_tuning([0.6, 0.1], per_draft=0.1), [(1, 4, 1), (5, 16, 0)], 4)
    warning = overhead_warning(idle)
    assert warning is not None
    assert "runs at 0.91 (0.90 to 0.92) of the speed" in warning
    assert "even without drafting" in warning
    assert overhead_warning(USELESS) is None  # it is not served
    assert overhead_warning(GOOD) is None  # it is never slower


def test_no_slowdown_is_claimed_that_was_not_measured() -> None:
    assert GOOD.loses_above is not None
    assert verdict(GOOD).endswith(f"speculation is not faster above {GOOD.loses_above}")


def test_next_command_serves_bare_without_gain() -> None:
    assert next_command(GOOD, FILE) == "leadout serve a-target --draft a-drafter --tuned tuned.json"
    assert next_command(USELESS, FILE) == "leadout serve a-target"


@pytest.mark.parametrize("tuned", [GOOD, USELESS], ids=["good", "useless"])
def test_terminal_table_has_every_batch_size(tuned: Tuned) -> None:
    console = Console(width=80, record=True, file=StringIO())
    print_tuned(tuned, FILE, Path("tuned.html"), console)
    shown = console.export_text()
    assert next_command(tuned, FILE) in shown
    assert "…" not in shown  # the table fits a narrow terminal
    rows = [line.split() for line in shown.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16"]
    assert [int(row[-1]) for row in rows] == [tuned.k_at(batch) for batch in (1, 2, 4, 8, 16)]


def test_page_marks_the_chosen_k_and_loads_nothing() -> None:
    content = page(GOOD, FILE)
    assert content.count("<svg") == 6
    text = Reader(content).text
    assert f"{GOOD.k_at(1)} {CHOSEN}" in text
    assert verdict(GOOD) in text
    assert_loads_nothing(content)


def test_page_escapes_names() -> None:
    model = GOOD.target.model_copy(update={"name": HOSTILE})
    hostile = GOOD.model_copy(update={"drafter": model, "target": model, "dtype": HOSTILE})
    assert_hostile_text_is_escaped(page(hostile, FILE))


def test_page_of_a_useless_drafter_marks_no_k() -> None:
    assert page(USELESS, FILE).count(CHOSEN) == 1  # in the explanation
