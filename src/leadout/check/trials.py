"""Which changes of the drafter raise acceptance: screened on some texts, tested on the others.

With dozens of changes, the one that looks best on some texts partly does so by chance. So all of
them are screened on every third text, and the best few of those that gain there are tested on the
texts that did not choose them. The p-values of those tests are corrected for their number by Holm's
method, so a test of a change without effect makes the others weaker; what was only screened is
never a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from leadout.check.hypotheses import Variant
from leadout.evaluate.acceptance import Gain
from leadout.findings import Finding, Severity, finding
from leadout.stats import LEVEL, holm

# Smaller gains are not worth an edit, significant or not.
MIN_GAIN = 0.01
# A gain of this size shows that the drafter hardly works as it is.
LARGE_GAIN = 0.25

SCREEN_EVERY = 3  # every third text is used to screen all variants, the others to test the best
FINALISTS = 6  # variants that are tested, at most
# A variant that gains less where it is screened is not tested. Half of what is worth an edit: a few
# texts may show less of a gain than there is.
MIN_SCREENED = MIN_GAIN / 2


@dataclass(frozen=True, slots=True)
class Trial:
    """The gain of a variant over the drafter as it is."""

    variant: Variant
    gain: Gain
    texts: int  # that it was measured on
    p_value: float | None  # corrected for the number of tests; None: screened only

    @property
    def is_proven(self) -> bool:
        """Tested, significant, and large enough to be worth an edit."""
        significant = self.p_value is not None and self.p_value <= 1 - LEVEL
        return significant and self.gain.relative >= MIN_GAIN

    @property
    def severity(self) -> Severity:
        if self.gain.relative >= LARGE_GAIN:
            return Severity.ERROR
        return Severity.NOTE if self.variant.may_be_intended else Severity.WARNING


class Parts(NamedTuple):
    """Indices of the texts that screen and of those that test."""

    screening: list[int]
    testing: list[int]


def parts_of(texts: int) -> Parts:
    """Texts are in the order of their sets, so both parts have some of every set."""
    return Parts(
        [i for i in range(texts) if i % SCREEN_EVERY == 0],
        [i for i in range(texts) if i % SCREEN_EVERY != 0],
    )


def screen_and_test(
    variants: Sequence[Variant], gain_on: Callable[[Variant, Sequence[int]], Gain], texts: int
) -> list[Trial]:
    """Try every variant; the tested ones come first, each group by its gain.

    `gain_on` measures a variant on the texts with these indices.
    """
    parts = parts_of(texts)
    screened = _best_first(
        Trial(variant, gain_on(variant, parts.screening), len(parts.screening), None)
        for variant in variants
    )
    gaining = sum(trial.gain.relative >= MIN_SCREENED for trial in screened)
    tested_count = min(gaining, FINALISTS)
    finalists = [trial.variant for trial in screened[:tested_count]]
    gains = [gain_on(variant, parts.testing) for variant in finalists]
    corrected = holm([gain.p_value for gain in gains])
    tested = _best_first(
        Trial(variant, gain, len(parts.testing), p_value)
        for variant, gain, p_value in zip(finalists, gains, corrected, strict=True)
    )
    return [*tested, *screened[tested_count:]]


def _best_first(trials: Iterable[Trial]) -> list[Trial]:
    """By relative gain, which is comparable between different selections of texts."""
    return sorted(trials, key=lambda trial: -trial.gain.relative)


def findings_of(trials: Sequence[Trial]) -> list[Finding]:
    """One finding for each cause whose undoing raises acceptance; `trials` are the best first."""
    found: dict[str, Finding] = {}
    for trial in trials:
        cause, edit, gain = trial.variant.cause, trial.variant.edit, trial.gain
        if cause in found or not trial.is_proven:
            continue
        assert trial.p_value is not None
        found[cause] = finding(
            trial.severity,
            cause,
            f"{edit} raises acceptance from {gain.before:.3f} to {gain.after:.3f} on the same "
            f"positions ({gain.relative:+.1%})",
            f"Optional, since the drafter may be as it was trained: {edit}."
            if trial.severity is Severity.NOTE
            else f"Make this edit, or let --fix write it: {edit}.",
            before=gain.before,
            after=gain.after,
            gain=gain.difference.value,
            gain_low=gain.difference.low,
            gain_high=gain.difference.high,
            p_value=trial.p_value,
            edit=edit,
        )
    return list(found.values())


def repair_of(trials: Sequence[Trial]) -> Variant | None:
    """The best variant that is more than a note, if its gain is proven."""
    for trial in trials:  # the best first
        if trial.severity is not Severity.NOTE:
            return trial.variant if trial.is_proven else None
    return None
