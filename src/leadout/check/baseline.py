"""Comparison with an earlier check of the same pair: has acceptance dropped, and what changed?

Acceptance differs far more between prompts than between two checks of one prompt. So the texts of
both checks are paired by prompt: the ratio of the two acceptance lengths on the shared prompts has
a bootstrap interval over prompts, and drops of a few percent are found. Single prompt sets are
several comparisons at once, so their p-values are corrected by Holm's method.

With too few shared prompts the two intervals are compared as those of independent estimates, which
finds large drops only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from leadout.check.result import CheckError, CheckResult, OfflineAcceptance, TextFigures
from leadout.check.trials import LARGE_GAIN, MIN_GAIN
from leadout.files import FileError, read_model
from leadout.findings import EvidenceValue, Finding, Severity, finding, note
from leadout.models import same_model
from leadout.stats import LEVEL, Floats, Indices, Interval, bootstrap, holm

MIN_SHARED = 10  # prompts of a paired comparison
_SAME_PROMPTS = "Give the same --prompts and --texts as for the baseline."
_LARGE_DROPS_ONLY = "acceptance is compared unpaired, which finds large drops only"


def read_baseline(path: Path) -> CheckResult:
    """Read a result with measured acceptance, as `leadout check --save` or `--json` writes it."""
    try:
        result = read_model(path, CheckResult)
    except FileError as problem:
        raise CheckError(
            f"--baseline {problem} Expected a result that `leadout check --save` wrote."
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
    pairs = shared_texts(new, old)
    if len(pairs) >= MIN_SHARED:
        findings = [*_paired_drops(pairs, changes), *_unshared(new, old, len(pairs))]
    else:
        findings = [*_unpaired_drops(new, old, changes), _unpaired(old, len(pairs))]
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


class Pair(NamedTuple):
    """The texts that two checks have for one prompt."""

    new: TextFigures
    old: TextFigures


def shared_texts(new: OfflineAcceptance, old: OfflineAcceptance) -> list[Pair]:
    earlier = {(text.prompt_set, text.prompt): text for text in old.texts}
    later = {(text.prompt_set, text.prompt): text for text in new.texts}
    return [Pair(text, earlier[key]) for key, text in later.items() if key in earlier]


@dataclass(frozen=True, slots=True)
class Change:
    """Acceptance length of some prompts now and then."""

    now: float
    then: float
    ratio: Interval  # bootstrap over prompts
    p_value: float  # two-sided, that nothing has changed


def change_of(pairs: Sequence[Pair]) -> Change:
    """Ratio of the acceptance lengths; the p-value is that of a t-test of its linearised log."""
    from scipy import stats

    tokens = np.array([[pair.new.tokens, pair.old.tokens] for pair in pairs], dtype=np.float64)
    steps = np.array([[pair.new.steps, pair.old.steps] for pair in pairs], dtype=np.float64)
    now, then = tokens.sum(0) / steps.sum(0)

    def ratio(drawn: Indices) -> Floats:
        lengths = tokens[drawn].sum(-2) / steps[drawn].sum(-2)  # [..., 2]
        found: Floats = lengths[..., 0] / lengths[..., 1]
        return found

    # What each prompt adds to the deviation of log(now) - log(then).
    parts = tokens / tokens.sum(0) - steps / steps.sum(0)  # [prompts, 2]
    deviations = parts[:, 0] - parts[:, 1]
    error = math.sqrt(float(deviations @ deviations) * len(pairs) / (len(pairs) - 1))
    size = abs(math.log(now / then))
    p_value = 1.0 if size == 0 else 0.0
    if error > 0:
        p_value = float(2 * stats.t.sf(size / error, len(pairs) - 1))
    return Change(float(now), float(then), bootstrap(len(pairs), ratio), p_value)


def _paired_drops(pairs: Sequence[Pair], changes: str) -> list[Finding]:
    by_set: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_set.setdefault(pair.new.prompt_set, []).append(pair)
    parts = {name: part for name, part in by_set.items() if len(part) >= MIN_SHARED}
    if len(by_set) == 1:  # it would be the same comparison twice
        parts = {}
    of_sets = {name: change_of(part) for name, part in parts.items()}
    corrected = holm([change.p_value for change in of_sets.values()])
    significant = [
        (name, len(parts[name]), change)
        for (name, change), p_value in zip(of_sets.items(), corrected, strict=True)
        if p_value <= 1 - LEVEL
    ]
    return [
        _paired_drop(name, texts, change, changes)
        for name, texts, change in [("all texts", len(pairs), change_of(pairs)), *significant]
        if change.ratio.high < 1 and change.then / change.now - 1 >= MIN_GAIN
    ]


def _paired_drop(name: str, texts: int, change: Change, changes: str) -> Finding:
    ratio = change.ratio
    return _drop(
        name,
        f"from {change.then:.3f} to {change.now:.3f} on the same {texts} prompts "
        f"({ratio.value - 1:+.1%}, 95% interval {ratio.low - 1:+.1%} to {ratio.high - 1:+.1%})",
        change.then / change.now - 1,
        changes,
        prompts=texts,
        before=change.then,
        after=change.now,
        ratio=ratio.value,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
    )


def _unshared(new: OfflineAcceptance, old: OfflineAcceptance, shared: int) -> list[Finding]:
    if shared == len(new.texts) == len(old.texts):
        return []
    message = (
        f"{shared} prompts are compared with the baseline, which has {len(old.texts)}; this check "
        f"has {len(new.texts)}"
    )
    return [note("other-prompts", message, _SAME_PROMPTS)]


def _unpaired(old: OfflineAcceptance, shared: int) -> Finding:
    if old.texts:
        reason = f"only {shared} prompts are also in the baseline, {MIN_SHARED} are needed"
        return note("not-paired", f"{reason}: {_LARGE_DROPS_ONLY}", _SAME_PROMPTS)
    reason = "the baseline has no figures by prompt"
    return note("not-paired", f"{reason}: {_LARGE_DROPS_ONLY}", "Save a new one with --save.")


def has_dropped(new: Interval, old: Interval) -> bool:
    """Whether the 95% confidence interval of the difference lies below zero."""
    margin = math.hypot(old.value - old.low, new.high - new.value)
    return old.value - new.value > margin


def _unpaired_drops(new: OfflineAcceptance, old: OfflineAcceptance, changes: str) -> list[Finding]:
    """Only sets of the same size are compared; for single sets the intervals must not overlap."""
    names = sorted({*new.by_set, *old.by_set})
    differing = [name for name in names if _texts(new, name) != _texts(old, name)]
    found: dict[str, tuple[Interval, Interval]] = {}
    if not differing and has_dropped(new.overall.length, old.overall.length):
        found["all texts"] = (new.overall.length, old.overall.length)
    for name in (name for name in new.by_set if name not in differing):
        now, then = new.by_set[name].length, old.by_set[name].length
        if now.high < then.low:
            found[name] = (now, then)
    return [
        _drop(
            name,
            f"from {then:.3f} to {now:.3f} ({now.value / then.value - 1:+.1%})",
            then.value / now.value - 1,
            changes,
            before=then.value,
            before_low=then.low,
            before_high=then.high,
            after=now.value,
            after_low=now.low,
            after_high=now.high,
        )
        for name, (now, then) in found.items()
        if then.value / now.value - 1 >= MIN_GAIN
    ]


def _drop(name: str, what: str, size: float, changes: str, /, **evidence: EvidenceValue) -> Finding:
    """`size` is what a return to the earlier acceptance would gain."""
    cause = f"changed since: {changes}" if changes else "no version has changed since"
    return finding(
        Severity.ERROR if size >= LARGE_GAIN else Severity.WARNING,
        "dropped-since-baseline",
        f"acceptance on {name} dropped {what}; {cause}",
        "Return to the versions served then, or continue training the drafter.",
        texts=name,
        **evidence,
    )


def _texts(side: OfflineAcceptance, name: str) -> int | None:
    return side.by_set[name].texts if name in side.by_set else None
