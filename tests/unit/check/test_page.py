"""The HTML page is complete and self-contained, and escapes hostile text."""

from __future__ import annotations

import pytest
from sample_results import finding, offline, table, tried, whole_result

from leadout.check.page import page
from leadout.check.result import Verdict
from leadout.findings import Severity
from support.pages import HOSTILE, Reader, assert_hostile_text_is_escaped, assert_loads_nothing

SEVERITIES = {Verdict.UNDECIDED: Severity.WARNING, Verdict.UNFIT: Severity.ERROR}


def undecided() -> str:
    findings = [finding(Severity.NOTE, name="drafter-file"), finding(name="rope")]
    return page(whole_result(verdict=Verdict.UNDECIDED, findings=findings))


def test_it_holds_what_the_result_says() -> None:
    text = Reader(undecided()).text
    for words in (
        "tiny-drafter for tiny-target",
        "undecided",
        "theta is 1, expected 2",
        "Change it.",
        "2.400",  # all texts, offline
        "2.30 to 2.50",
        "served greedy",
        "served at temperature 0.8",
        "prompts code",
        "prompt length 256 to 511",
        "35 of 36 drafts in 12 blocks are equal",
        "layer 1 context keys",
        "19 of 20 texts are equal",
        "0.0123",
        "rope-theta: 1 -> 2",
        "+0.300",
        "2.13.0",
    ):
        assert words in text, words
    assert text.index("rope") < text.index("drafter-file")  # the most severe first


def test_it_loads_nothing_and_runs_nothing() -> None:
    assert_loads_nothing(undecided())


def test_hostile_text_stays_text() -> None:
    result = whole_result(
        verdict=Verdict.UNFIT,
        target=HOSTILE,
        drafter=HOSTILE,
        findings=[finding(Severity.ERROR, name=HOSTILE, message=HOSTILE, remedy=HOSTILE)],
        offline=offline(2.0, 0.1, {HOSTILE: table(2.0)}),
        tried=[tried(HOSTILE, 2.5)],
        versions={HOSTILE: HOSTILE},
        date=HOSTILE,
    )
    assert_hostile_text_is_escaped(page(result))


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_static_check_has_a_page_too(verdict: Verdict) -> None:
    findings = [] if verdict is Verdict.FIT else [finding(SEVERITIES[verdict])]
    bare = whole_result(
        static_only=True,
        verdict=verdict,
        findings=findings,
        draft_tokens=None,
        offline=None,
        served=[],
        parity=None,
        lossless=None,
        prefix_cache=None,
        long_context=None,
        tried=[],
        versions={},
    )
    read = Reader(page(bare))
    assert verdict.value in read.text
    assert "Acceptance" not in read.text
    assert ("was not measured" in read.text) == (verdict is Verdict.FIT)
