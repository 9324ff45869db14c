"""What people read: the verdict, the table, the page, and the command to copy."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from leadout.control.tuned_file import Tuned
from leadout.tune.report import (
    CHOSEN,
    NOTHING_GAINED,
    next_command,
    page,
    price,
    print_tuned,
    verdict,
)
from support.tuned_files import a_tuning

GOOD, USELESS = a_tuning([0.9, 0.85, 0.8, 0.8]), a_tuning([0.02, 0.0, 0.0, 0.0])
FILE = Path("tuned.json")


def with_table(tuned: Tuned, table: list[tuple[int, int, int]], loses_above: int | None) -> Tuned:
    return tuned.model_copy(update={"table": table, "loses_above": loses_above})


@pytest.mark.parametrize(
    ("table", "loses_above", "said"),
    [
        (
            [(1, 3, 4), (4, 8, 2), (9, 16, 0)],
            8,
            "draft 4 tokens up to 3 requests at a time, 2 up to 8, none above: speculation loses "
            "above 8",
        ),
        (
            [(1, 1, 2), (2, 16, 1)],
            None,
            "draft 2 tokens up to 1 request at a time, 1 above: speculation gains at all of them, "
            "up to the 16 measured",
        ),
        (
            [(1, 16, 1)],
            None,
            "draft 1 token at every batch size: speculation gains at all of them, up to the 16 "
            "measured",
        ),
        ([(1, 16, 0)], 0, NOTHING_GAINED),
    ],
)
def test_the_verdict_is_one_plain_sentence(
    table: list[tuple[int, int, int]], loses_above: int | None, said: str
) -> None:
    assert verdict(with_table(GOOD, table, loses_above)) == said


def test_the_price_of_a_resting_drafter_is_told() -> None:
    resting = with_table(a_tuning([0.6, 0.1], per_draft=0.1), [(1, 4, 1), (5, 16, 0)], 4)
    said = price(resting)
    assert said is not None
    assert "0.91 (0.90 to 0.92) of the speed" in said
    assert "though it drafts nothing" in said
    assert price(USELESS) is None  # it is not served
    assert price(GOOD) is None  # at its worst it does not lose


def test_no_loss_is_claimed_that_was_not_measured() -> None:
    assert GOOD.loses_above is not None
    assert verdict(GOOD).endswith(f"speculation gains nothing above {GOOD.loses_above}")


def test_the_command_serves_bare_where_nothing_is_gained() -> None:
    assert next_command(GOOD, FILE) == "leadout serve a-target --draft a-drafter --tuned tuned.json"
    assert next_command(USELESS, FILE) == "leadout serve a-target"


@pytest.mark.parametrize("tuned", [GOOD, USELESS], ids=["good", "useless"])
def test_the_terminal_shows_every_batch_size(tuned: Tuned) -> None:
    console = Console(width=80, record=True, file=StringIO())
    print_tuned(tuned, FILE, Path("tuned.html"), console)
    shown = console.export_text()
    assert next_command(tuned, FILE) in shown
    assert "…" not in shown  # the table fits a narrow terminal
    rows = [line.split() for line in shown.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16"]
    assert [int(row[-1]) for row in rows] == [tuned.k_at(batch) for batch in (1, 2, 4, 8, 16)]


def test_the_page_marks_the_chosen_length_and_loads_nothing() -> None:
    shown = page(GOOD, FILE)
    assert shown.count("<svg") == 6
    assert shown.count(f"{GOOD.k_at(1)} {CHOSEN}") > 0
    assert "http" not in shown
    assert "<script" not in shown
    assert verdict(GOOD) in shown


def test_the_page_of_a_useless_drafter_marks_nothing() -> None:
    assert page(USELESS, FILE).count(CHOSEN) == 1  # in the explanation
