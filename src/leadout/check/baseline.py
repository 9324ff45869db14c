"""An earlier check of the same pair: has acceptance dropped since, and what else has changed?

Two intervals that do not overlap are more than a significant difference needs. For all texts
together the interval of the difference is made from both (each side's distances, squared and
added, as for independent estimates). Checks of the same prompts are not independent but vary
together, so the true interval is narrower still: an alarm here errs towards silence. Single sets
are many, so that one of them is bound to look odd; for them the intervals must not overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from leadout.check.diagnosis import GRAVE_GAIN, SMALLEST_GAIN
from leadout.check.result import (
    CheckError,
    CheckResult,
    Evidence,
    Finding,
    Gravity,
    OfflineAcceptance,
    verdict_of,
)
from leadout.evaluate.acceptance import AcceptanceTable
from leadout.models import same_model
from leadout.stats import Interval


class BaselineError(CheckError):
    """A baseline that this check cannot be compared with."""


def read_baseline(path: Path) -> CheckResult:
    """A result that `leadout check --save` or `--json` wrote, with acceptance in it."""
    try:
        result = CheckResult.model_validate_json(path.read_bytes())
    except OSError as problem:
        raise BaselineError(
            f"--baseline {path}: found {problem.strerror}, wanted a file; check the path"
        ) from None
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise BaselineError(
            f"--baseline {path}: {field}: {first['msg']}; wanted a result as `leadout check "
            "--save` writes it"
        ) from None
    if result.offline is None:
        raise BaselineError(
            f"--baseline {path}: found no acceptance in it, wanted the result of a whole check; "
            "repeat that one without --static"
        )
    return result


def compared(result: CheckResult, baseline: CheckResult) -> CheckResult:
    """The result with what the comparison found, and the verdict that follows."""
    findings = [*result.findings, *baseline_findings(result, baseline)]
    return result.model_copy(update={"findings": findings, "verdict": verdict_of(findings)})


def baseline_findings(result: CheckResult, baseline: CheckResult) -> list[Finding]:
    require_same_pair(baseline, result.target, result.drafter)
    new, old = result.offline, baseline.offline
    if new is None or old is None:
        return [
            Finding(
                name="not-compared",
                gravity=Gravity.NOTE,
                message="acceptance was not measured, so it was not compared with the baseline",
                remedy="Do first what the other findings say.",
            )
        ]
    _require_same_draft_tokens(baseline, result.draft_tokens)
    changes = version_changes(baseline.versions, result.versions)
    findings = _drops(new, old, changes)
    differing = _other_prompts(new, old)
    if differing:
        findings.append(
            Finding(
                name="other-prompts",
                gravity=Gravity.NOTE,
                message=(
                    f"found other prompts than in the baseline ({', '.join(differing)}): only "
                    "equal sets are compared"
                ),
                remedy="Give the same --prompts as for the baseline.",
            )
        )
    if changes:
        findings.append(
            Finding(
                name="versions-since-baseline",
                gravity=Gravity.NOTE,
                message=f"changed since the baseline of {baseline.date or 'then'}: {changes}",
                remedy="Nothing to do, unless acceptance has dropped.",
            )
        )
    return findings


def require_same_pair(baseline: CheckResult, target: str, drafter: str) -> None:
    """Known before anything is run, so it can be asked first."""
    pairs = {"target": (baseline.target, target), "drafter": (baseline.drafter, drafter)}
    for role, (found, wanted) in pairs.items():
        if not same_model(found, wanted):
            raise BaselineError(
                f"--baseline: found a check of the {role} {found}, wanted one of {wanted}; give "
                "the baseline of this pair"
            )


def _require_same_draft_tokens(baseline: CheckResult, draft_tokens: int | None) -> None:
    if baseline.draft_tokens != draft_tokens:
        raise BaselineError(
            f"--baseline: found {baseline.draft_tokens} drafted tokens, wanted {draft_tokens} as "
            "in this check: acceptance lengths of different K cannot be compared; add "
            f"--draft-tokens {baseline.draft_tokens}"
        )


def version_changes(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    changed = [
        f"{name} {old.get(name, 'absent')} -> {new.get(name, 'absent')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    return ", ".join(changed)


def has_dropped(new: Interval, old: Interval) -> bool:
    """Whether the 95% interval of the difference lies below zero."""
    margin = math.hypot(old.value - old.low, new.high - new.value)
    return old.value - new.value > margin


def _drops(new: OfflineAcceptance, old: OfflineAcceptance, changes: str) -> list[Finding]:
    found: dict[str, tuple[Interval, Interval]] = {}
    if not _other_prompts(new, old) and has_dropped(new.overall.length, old.overall.length):
        found["all texts"] = (new.overall.length, old.overall.length)
    for name in _equal_sets(new, old):
        now, then = new.by_set[name].length, old.by_set[name].length
        if now.high < then.low:
            found[name] = (now, then)
    return [
        _drop(name, now, then, changes)
        for name, (now, then) in found.items()
        if then.value / now.value - 1 >= SMALLEST_GAIN
    ]


def _drop(name: str, now: Interval, then: Interval, changes: str) -> Finding:
    evidence: Evidence = {
        "texts": name,
        "before": then.value,
        "before_low": then.low,
        "before_high": then.high,
        "after": now.value,
        "after_low": now.low,
        "after_high": now.high,
    }
    cause = f"changed since: {changes}" if changes else "no version has changed since"
    return Finding(
        name="dropped-since-baseline",
        gravity=Gravity.UNFIT if then.value / now.value - 1 >= GRAVE_GAIN else Gravity.DOUBTFUL,
        message=(
            f"acceptance on {name} dropped from {then} to {now} ({now.value / then.value - 1:+.1%})"
            f"; {cause}"
        ),
        evidence=evidence,
        remedy="Go back to what was served then, or go on training the drafter.",
    )


def _equal_sets(new: OfflineAcceptance, old: OfflineAcceptance) -> list[str]:
    """Sets in both with as many texts; nothing more tells whether they are the same."""
    return [name for name in new.by_set if _count(new, name) == _count(old, name)]


def _other_prompts(new: OfflineAcceptance, old: OfflineAcceptance) -> list[str]:
    names = sorted({*new.by_set, *old.by_set})
    return [name for name in names if _count(new, name) != _count(old, name)]


def _count(side: OfflineAcceptance, name: str) -> int | None:
    table: AcceptanceTable | None = side.by_set.get(name)
    return None if table is None else table.texts
