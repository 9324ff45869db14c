"""Comparison with an earlier check of the same pair: has acceptance dropped, and what changed?

For all texts together, the 95% confidence interval of the difference combines both intervals as
for independent estimates (distances squared and added). Checks on the same prompts are positively
correlated, so the true interval is narrower: the comparison is conservative. Single prompt sets
are several comparisons at once, so for them the two intervals must not overlap, which is stricter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from leadout.check.diagnosis import LARGE_GAIN, MIN_GAIN
from leadout.check.result import CheckError, CheckResult, OfflineAcceptance
from leadout.files import read_text
from leadout.findings import Finding, Severity, finding, note
from leadout.models import same_model
from leadout.stats import Interval


def read_baseline(path: Path) -> CheckResult:
    """Read a result with measured acceptance, as `leadout check --save` or `--json` writes it."""
    try:
        result = CheckResult.model_validate_json(read_text(path))
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise CheckError(
            f"--baseline {path}: {field}: {first['msg']}. Expected a result that `leadout check "
            "--save` wrote."
        ) from None
    if result.offline is None:
        raise CheckError(
            f"--baseline {path} has no measured acceptance. Repeat that check without --static."
        )
    return result


def require_same_pair(baseline: CheckResult, target: str, drafter: str) -> None:
    pairs = {"target": (baseline.target, target), "drafter": (baseline.drafter, drafter)}
    for role, (got, expected) in pairs.items():
        if not same_model(got, expected):
            raise CheckError(
                f"--baseline is a check of the {role} {got}, expected {expected}. Give the "
                "baseline of this pair."
            )


def baseline_findings(result: CheckResult, baseline: CheckResult) -> list[Finding]:
    require_same_pair(baseline, result.target, result.drafter)
    new, old = result.offline, baseline.offline
    if new is None or old is None:
        message = "acceptance was not measured, so it was not compared with the baseline"
        return [note("not-compared", message, "First follow the remedies of the other findings.")]
    if baseline.draft_tokens != result.draft_tokens:
        raise CheckError(
            f"--baseline was measured with {baseline.draft_tokens} draft tokens, this check with "
            f"{result.draft_tokens}: acceptance lengths of different K cannot be compared. Add "
            f"--draft-tokens {baseline.draft_tokens}."
        )
    changes = version_changes(baseline.versions, result.versions)
    # Sets of one side only or of another number of texts; results hold no more to compare.
    names = sorted({*new.by_set, *old.by_set})
    differing = [name for name in names if _texts(new, name) != _texts(old, name)]
    findings = _drops(new, old, differing, changes)
    if differing:
        message = (
            f"the prompts differ from those of the baseline ({', '.join(differing)}): only equal "
            "sets are compared"
        )
        remedy = "Give the same --prompts and --texts as for the baseline."
        findings.append(note("other-prompts", message, remedy))
    if changes:
        message = f"changed since the baseline of {baseline.date or 'then'}: {changes}"
        remedy = "Nothing to do, unless acceptance has dropped."
        findings.append(note("versions-since-baseline", message, remedy))
    return findings


def version_changes(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    changed = [
        f"{name} {old.get(name, 'absent')} -> {new.get(name, 'absent')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    return ", ".join(changed)


def has_dropped(new: Interval, old: Interval) -> bool:
    """Whether the 95% confidence interval of the difference lies below zero."""
    margin = math.hypot(old.value - old.low, new.high - new.value)
    return old.value - new.value > margin


def _drops(
    new: OfflineAcceptance, old: OfflineAcceptance, differing: Sequence[str], changes: str
) -> list[Finding]:
    found: dict[str, tuple[Interval, Interval]] = {}
    if not differing and has_dropped(new.overall.length, old.overall.length):
        found["all texts"] = (new.overall.length, old.overall.length)
    for name in (name for name in new.by_set if name not in differing):
        now, then = new.by_set[name].length, old.by_set[name].length
        if now.high < then.low:
            found[name] = (now, then)
    return [
        _drop(name, now, then, changes)
        for name, (now, then) in found.items()
        if then.value / now.value - 1 >= MIN_GAIN
    ]


def _drop(name: str, now: Interval, then: Interval, changes: str) -> Finding:
    cause = f"changed since: {changes}" if changes else "no version has changed since"
    large = then.value / now.value - 1 >= LARGE_GAIN
    return finding(
        Severity.ERROR if large else Severity.WARNING,
        "dropped-since-baseline",
        f"acceptance on {name} dropped from {then:.3f} to {now:.3f} "
        f"({now.value / then.value - 1:+.1%}); {cause}",
        "Return to the versions served then, or continue training the drafter.",
        texts=name,
        before=then.value,
        before_low=then.low,
        before_high=then.high,
        after=now.value,
        after_low=now.low,
        after_high=now.high,
    )


def _texts(side: OfflineAcceptance, name: str) -> int | None:
    return side.by_set[name].texts if name in side.by_set else None
