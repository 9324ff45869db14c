"""A drop since an earlier check is told apart from chance; different checks are not compared."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from sample_results import SETS, figures, interval, offline, table, whole_result

from leadout.check.baseline import MIN_SHARED, baseline_findings, has_dropped, read_baseline
from leadout.check.result import CheckError, CheckResult
from leadout.files import FileError
from leadout.findings import Finding, Severity

LEVEL_SETS = {name: table(2.4, 0.2) for name in SETS}


def result(length: float, half: float = 0.1, **fields: object) -> CheckResult:
    return whole_result(offline=offline(length, half, LEVEL_SETS), **fields)


def drops(new: CheckResult, old: CheckResult) -> list[Finding]:
    return [each for each in baseline_findings(new, old) if each.severity is not Severity.NOTE]


def notes(new: CheckResult, old: CheckResult) -> dict[str, str]:
    found = baseline_findings(new, old)
    return {each.name: each.message for each in found if each.severity is Severity.NOTE}


def paired(lengths: Sequence[float], prompt_set: str = "code", first: int = 0) -> CheckResult:
    texts = figures(lengths, prompt_set, first=first)
    return whole_result(offline=offline(2.4, 0.1, LEVEL_SETS).model_copy(update={"texts": texts}))


def joined(*results: CheckResult) -> CheckResult:
    texts = [text for each in results for text in (each.offline.texts if each.offline else [])]
    return whole_result(offline=offline(2.4, 0.1, LEVEL_SETS).model_copy(update={"texts": texts}))


# Prompts differ by far more than 5%.
VARIED = [1.4, 1.6, 1.7, 1.9, 2.0, 2.1, 2.2, 2.4, 2.6, 2.8, 3.0, 3.4, 1.5, 2.5, 1.8]


def test_a_drop_of_5_percent_is_found_on_the_same_prompts() -> None:
    noise = np.random.default_rng(0).normal(1, 0.04, len(VARIED))
    now = [length * 0.95 * each for length, each in zip(VARIED, noise, strict=True)]
    (drop,) = drops(paired(now), paired(VARIED))
    assert (drop.name, drop.severity) == ("dropped-since-baseline", Severity.WARNING)
    assert "on the same 15 prompts (-" in drop.message
    assert float(str(drop.evidence["ratio_high"])) < 1
    # The two intervals alone overlap by far.
    assert not has_dropped(interval(2.1, 0.3), interval(2.2, 0.3))


def test_the_same_texts_and_noise_without_a_drop_are_no_finding() -> None:
    assert baseline_findings(paired(VARIED), paired(VARIED)) == []
    noise = np.random.default_rng(1).normal(0, 0.1, len(VARIED))
    noise -= noise.mean()
    now = [length * math.exp(each) for length, each in zip(VARIED, noise, strict=True)]
    assert drops(paired(now), paired(VARIED)) == []
    assert drops(paired([2 * length for length in VARIED]), paired(VARIED)) == []


def test_a_large_paired_drop_is_an_error_and_a_tiny_one_nothing() -> None:
    (drop,) = drops(paired([length * 0.75 for length in VARIED]), paired(VARIED))
    assert drop.severity is Severity.ERROR
    long = [figures(VARIED, steps=4000), figures([each * 0.995 for each in VARIED], steps=4000)]
    old, new = (
        whole_result(offline=offline().model_copy(update={"texts": texts})) for texts in long
    )
    assert drops(new, old) == []


def test_a_drop_in_one_set_is_found_among_the_others() -> None:
    old = joined(paired(VARIED, "code"), *(paired(VARIED * 3, name) for name in ("chat", "math")))
    worse = paired([length * 0.9 for length in VARIED], "code")
    new = joined(worse, *(paired(VARIED * 3, name) for name in ("chat", "math")))
    assert "code" in [drop.evidence["texts"] for drop in drops(new, old)]
    assert "chat" not in [drop.evidence["texts"] for drop in drops(new, old)]


def test_shared_prompts_are_paired_and_their_number_is_named() -> None:
    old = joined(paired(VARIED), paired([1.1] * 20, first=100))
    new = joined(paired([length * 0.9 for length in VARIED]), paired([5.0] * 3, first=200))
    (drop,) = drops(new, old)
    assert drop.evidence["prompts"] == len(VARIED)
    assert (
        "15 prompts are compared with the baseline, which has 35"
        in notes(new, old)["other-prompts"]
    )


def test_too_few_shared_prompts_are_compared_unpaired() -> None:
    few = MIN_SHARED - 1
    old, new = paired(VARIED), paired([length * 0.5 for length in VARIED[:few]])
    assert drops(new, old) == []  # the tables are equal
    assert f"only {few} prompts are also in the baseline" in notes(new, old)["not-paired"]
    assert "no figures by prompt" in notes(result(2.4), result(2.4))["not-paired"]


def test_no_drop_gives_no_finding() -> None:
    assert drops(result(2.4), result(2.4)) == []
    assert drops(result(2.8), result(2.4)) == []  # a rise is no finding


@pytest.mark.parametrize(
    ("now", "severity"), [(2.1, Severity.WARNING), (1.9, Severity.ERROR), (2.3, None)]
)
def test_a_drop_of_all_texts(now: float, severity: Severity | None) -> None:
    found = drops(result(now), result(2.4))
    if severity is None:
        assert found == []
        return
    (drop,) = found
    assert (drop.name, drop.severity) == ("dropped-since-baseline", severity)
    assert "all texts" in drop.message
    assert f"{now:.3f}" in drop.message
    assert "no version has changed since" in drop.message
    assert drop.evidence["before"] == 2.4


def test_the_interval_of_the_difference_decides() -> None:
    # Overlapping, and yet significant: 0.15 is more than sqrt(0.1² + 0.1²).
    assert has_dropped(interval(2.25), interval(2.4))
    assert not has_dropped(interval(2.27), interval(2.4))
    assert not has_dropped(interval(2.6), interval(2.4))


def test_a_tiny_drop_is_not_reported_even_if_significant() -> None:
    assert drops(result(2.39, 0.001), result(2.4, 0.001)) == []


def test_a_drop_in_one_set_requires_separate_intervals() -> None:
    old = whole_result(offline=offline(2.4, 0.1, LEVEL_SETS))
    near = whole_result(offline=offline(2.4, 0.1, LEVEL_SETS | {"code": table(2.05, 0.2)}))
    assert drops(near, old) == []
    apart = whole_result(offline=offline(2.4, 0.1, LEVEL_SETS | {"code": table(1.9, 0.2)}))
    (drop,) = drops(apart, old)
    assert drop.evidence["texts"] == "code"


def test_versions_that_changed_are_named() -> None:
    new = result(2.0, versions={"leadout": "0.1", "torch": "2.14.0", "vllm": "0.32.1"})
    drop, _, note = baseline_findings(new, result(2.4))
    for found in (drop, note):
        assert "torch 2.13.0 -> 2.14.0, vllm absent -> 0.32.1" in found.message
    assert (note.name, note.severity) == ("versions-since-baseline", Severity.NOTE)


def test_other_prompt_sets_are_not_compared() -> None:
    other = whole_result(offline=offline(1.5, 0.1, {"poems": table(1.5), "code": table(1.2)}))
    (drop,) = drops(other, result(2.4))
    assert drop.evidence["texts"] == "code"  # the one set that both have


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_another_pair_is_an_error(role: str) -> None:
    with pytest.raises(CheckError, match=f"the {role} owner/another"):
        baseline_findings(result(2.4), result(2.4, **{role: "owner/another"}))


def test_the_same_pair_from_another_folder_is_no_error() -> None:
    assert drops(result(2.4), result(2.4, drafter="/elsewhere/tiny-drafter")) == []


def test_another_number_of_drafts_is_an_error() -> None:
    with pytest.raises(CheckError, match="--draft-tokens 7"):
        baseline_findings(result(2.4), result(2.4, draft_tokens=7))


def test_a_check_that_measured_nothing_is_not_compared() -> None:
    unmeasured = whole_result(offline=None, served=[], draft_tokens=None)
    (note,) = baseline_findings(unmeasured, result(2.4))
    assert (note.name, note.severity) == ("not-compared", Severity.NOTE)


def test_a_saved_result_is_read_back(tmp_path: Path) -> None:
    saved = result(2.4)
    (tmp_path / "old.json").write_text(saved.model_dump_json(indent=2))
    assert read_baseline(tmp_path / "old.json") == saved


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("{", "Invalid JSON"),
        ('{"target": 1}', "target: Input should be a valid string"),
        (whole_result(offline=None).model_dump_json(), "no measured acceptance"),
        (re.sub(r'"tokens":\d+', f'"tokens":{10**400}', paired([2.4]).model_dump_json()), "tokens"),
    ],
)
def test_a_file_that_is_not_a_baseline_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "old.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises((CheckError, FileError), match=message):
        read_baseline(path)
