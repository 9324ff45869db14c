"""What the terminal shows of a check."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from sample_results import finding, tried, whole_result

from leadout.check.report import (
    MAX_TRIED,
    best_tried,
    next_step,
    print_result,
    sentence,
    verdict_text,
)
from leadout.check.result import TOO_FEW_TEXTS, CheckResult, Verdict
from leadout.findings import Severity

PAIR = "owner/tiny-target drafters/tiny-drafter"


def shown(result: CheckResult, **options: bool | list[Path]) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_result(result, console, **options)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_pair_that_fits_is_not_advice_to_deploy_it() -> None:
    assert sentence(whole_result()) == (
        "tiny-drafter fits tiny-target: 2.40 tokens per step of the target (95% interval 2.30 to "
        "2.50), 2.38 served greedy, 2.11 served at temperature 0.8. Whether drafting pays depends "
        f"on the machine: measure it with `leadout tune {PAIR}`."
    )
    assert next_step(whole_result()) == f"leadout tune {PAIR}"


def test_a_static_check_names_the_measuring_one() -> None:
    static = whole_result(static_only=True, offline=None, served=[])
    assert "was not measured" in sentence(static)
    assert next_step(static) == f"leadout check {PAIR}"


@pytest.mark.parametrize(
    ("verdict", "severity", "opening"),
    [
        (Verdict.UNFIT, Severity.ERROR, "Do not deploy this pair"),
        (Verdict.UNDECIDED, Severity.WARNING, "Look into this first"),
    ],
)
def test_the_most_severe_finding_and_its_remedy(
    verdict: Verdict, severity: Severity, opening: str
) -> None:
    findings = [
        finding(Severity.NOTE, name="note"),
        finding(Severity.WARNING, name="later"),
        finding(severity, name="mask", message="mask_token_id is 1, expected 2"),
    ]
    if severity is Severity.WARNING:
        del findings[1]
    text = sentence(whole_result(verdict=verdict, findings=findings))
    assert text.startswith(f"{opening}: mask: mask_token_id is 1, expected 2. Change it.")
    assert ("(1 more finding)" in text) == (severity is Severity.ERROR)


def test_too_few_texts_are_part_of_the_verdict() -> None:
    message, remedy = "the interval is ±15%", "Give at least 81 prompts."
    few = finding(name=TOO_FEW_TEXTS, message=message, remedy=remedy)
    undecided = whole_result(verdict=Verdict.UNDECIDED, findings=[few])
    assert verdict_text(undecided) == "undecided: too few texts"
    assert sentence(undecided) == "The interval is ±15%. Give at least 81 prompts."
    assert shown(undecided).startswith("UNDECIDED: TOO FEW TEXTS  The interval is ±15%.")
    unfit = whole_result(verdict=Verdict.UNFIT, findings=[few, finding(Severity.ERROR)])
    assert verdict_text(unfit) == "unfit"
    assert "Do not deploy" in sentence(unfit)


def test_the_next_step_after_a_problem() -> None:
    problem = whole_result(verdict=Verdict.UNDECIDED, findings=[finding()])
    assert next_step(problem) == "follow the remedy, then repeat the check"
    repairable = finding(evidence={"edit": "mask_token_id: 1 -> 2"})
    problem = whole_result(verdict=Verdict.UNDECIDED, findings=[repairable])
    assert next_step(problem).startswith(f"leadout check {PAIR} --fix FOLDER")
    fixed = finding(Severity.NOTE, name="fixed", remedy="Check it again: leadout check a b")
    problem = whole_result(verdict=Verdict.UNDECIDED, findings=[repairable, fixed])
    assert next_step(problem) == "Check it again: leadout check a b"


def test_tables() -> None:
    text = shown(whole_result(verdict=Verdict.UNDECIDED, findings=[finding()]))
    lines = text.splitlines()
    assert lines[0].startswith("UNDECIDED  Look into this first")
    (row,) = [line for line in lines if line.strip().startswith("prompts chat")]
    assert row.split() == ["prompts", "chat", "16", "2.60", "2.40", "to", "2.80", "2.48", "2.21"]
    assert "35 of 36 drafts" in text
    assert "19 of 20 texts" in text
    assert "+0.30" in text


def test_changes_that_were_tried_are_shown_if_something_is_wrong() -> None:
    assert "Changes tried" not in shown(whole_result())
    assert "Changes tried" in shown(whole_result(), verbose=True)
    assert "Changes tried" in shown(whole_result(verdict=Verdict.UNFIT, findings=[finding()]))


def test_only_the_best_changes_are_shown() -> None:
    many = whole_result(tried=[tried(f"cause-{n}", 2.0 + n / 100) for n in range(20)])
    assert [each.cause for each in best_tried(many)][:2] == ["cause-19", "cause-18"]
    assert len(best_tried(many)) == MAX_TRIED
    text = shown(many, verbose=True)
    assert "the best 8 of 20" in text
    assert "cause-3 " not in text


def test_it_ends_with_the_written_files_and_the_next_step() -> None:
    lines = shown(whole_result(), written=[Path("a.html"), Path("b.json")]).splitlines()
    assert lines[-3:] == ["wrote a.html", "wrote b.json", f"Next: leadout tune {PAIR}"]


def test_text_from_files_is_neither_markup_nor_control() -> None:
    hostile = "[bold]x[/bold][/nope] \x1b[2J"
    text = shown(
        whole_result(
            verdict=Verdict.UNFIT,
            target=hostile,
            findings=[finding(Severity.ERROR, name=hostile, message=hostile)],
            tried=[tried(hostile, 2.0)],
        )
    )
    assert "[bold]x[/bold][/nope]" in text
    assert "\x1b[2J" not in text


def test_losslessness_is_shown_beside_its_control() -> None:
    text = " ".join(shown(whole_result()).split())
    assert "Losslessness: 19 of 20 texts are equal with and without drafts" in text
    assert (
        "Control, vLLM without drafts at 4 instead of 16 requests at a time: 18 of 20 texts are "
        "equal; there the logits are at most 0.046 apart." in text
    )
    assert "p = 0.88" in text


def test_the_prefix_cache_is_shown() -> None:
    text = " ".join(shown(whole_result()).split())
    assert "Prefix cache: the acceptance length of 6 texts is 2.34 with 75% of their" in text
    assert "ratio 0.99 (0.97 to 1.01)" in text


def test_long_contexts_and_their_limits_are_shown() -> None:
    text = " ".join(shown(whole_result()).split())
    assert "Long contexts: acceptance length 2.20 (2.10 to 2.30) after 240 tokens" in text
    assert "Measured up to 2048 tokens; positions of the target: 8192" in text
