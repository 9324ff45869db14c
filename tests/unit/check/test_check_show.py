"""What the terminal shows of a check."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from sample_results import finding, tried, whole_result

from leadout.check.report import MOST_TRIED, best_tried, print_result, sentence
from leadout.check.result import CheckResult, Gravity, Verdict


def shown(result: CheckResult) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_result(result, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_fit_pair_in_one_sentence() -> None:
    assert sentence(whole_result()) == (
        "Deploy tiny-drafter for tiny-target: 2.40 tokens for each step of the target (2.30 to "
        "2.50), 2.38 served greedy, 2.11 served at temperature 0.8."
    )


@pytest.mark.parametrize(
    ("gravity", "opening"),
    [(Gravity.UNFIT, "Do not deploy this pair"), (Gravity.DOUBTFUL, "Look into this first")],
)
def test_the_gravest_finding_and_its_remedy(gravity: Gravity, opening: str) -> None:
    findings = [
        finding(Gravity.NOTE, name="note"),
        finding(Gravity.DOUBTFUL, name="later"),
        finding(gravity, name="mask", message="found 1, wanted 2"),
    ]
    if gravity is Gravity.DOUBTFUL:
        del findings[1]
    words = sentence(whole_result(verdict=Verdict(gravity.value), findings=findings))
    assert words.startswith(f"{opening}: mask: found 1, wanted 2. Mend it.")
    assert ("(1 more finding)" in words) == (gravity is Gravity.UNFIT)


def test_tables() -> None:
    text = shown(whole_result(verdict=Verdict.DOUBTFUL, findings=[finding()]))
    lines = text.splitlines()
    assert lines[0].startswith("DOUBTFUL  Look into this first")
    (row,) = [line for line in lines if line.strip().startswith("prompts chat")]
    assert row.split() == ["prompts", "chat", "16", "2.60", "2.40", "to", "2.80", "2.48", "2.21"]
    assert "35 of 36 drafts" in text
    assert "19 of 20 texts" in text
    assert "+0.30" in text


def test_only_the_best_changes_are_shown() -> None:
    many = whole_result(tried=[tried(f"cause-{n}", 2.0 + n / 100) for n in range(20)])
    assert [each.cause for each in best_tried(many)][:2] == ["cause-19", "cause-18"]
    assert len(best_tried(many)) == MOST_TRIED
    text = shown(many)
    assert "the best 8 of 20" in text
    assert "cause-3 " not in text


def test_text_of_files_is_neither_markup_nor_control() -> None:
    hostile = "[bold]x[/bold][/nope] \x1b[2J"
    text = shown(
        whole_result(
            verdict=Verdict.UNFIT,
            target=hostile,
            findings=[finding(Gravity.UNFIT, name=hostile, message=hostile)],
            tried=[tried(hostile, 2.0)],
        )
    )
    assert "[bold]x[/bold][/nope]" in text
    assert "\x1b[2J" not in text
