"""Whether a candidate may take the serving drafter's place: a pure function of what was measured.

Requests, not tokens, are drawn again for the intervals, and both drafters are judged on the same
requests of each draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from leadout.check import lossless
from leadout.check.acceptance import Interval, TextAcceptance, bootstrap
from leadout.check.findings import Finding, Gravity
from leadout.check.result import Lossless


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Margins(_Record):
    """As shares of the serving drafter's acceptance length."""

    gain: float  # on traffic, at least
    base_loss: float  # on replayed data, at most


class Comparison(_Record):
    """Acceptance lengths of the serving drafter and the candidate on the same requests."""

    requests: int
    before: Interval
    after: Interval
    change: Interval  # as a share of before


class Evidence(_Record):
    """All that is known of a candidate; None was not tried, because the files forbid to run it."""

    findings: list[Finding]
    traffic: Comparison | None = None
    base: Comparison | None = None
    base_by_source: dict[str, Comparison] = {}
    lossless: Lossless | None = None


class Decision(_Record):
    passed: bool
    reasons: list[str]  # why it passed, or everything that speaks against it


def compare(before: Sequence[TextAcceptance], after: Sequence[TextAcceptance]) -> Comparison:
    """By acceptance along decoding, over all requests."""
    old, new = _Sums(before), _Sums(after)
    count = len(before)
    return Comparison(
        requests=count,
        before=bootstrap(count, old.length),
        after=bootstrap(count, new.length),
        change=bootstrap(count, lambda draw: new.length(draw) / old.length(draw) - 1),
    )


def compare_by_source(
    before: Sequence[TextAcceptance], after: Sequence[TextAcceptance]
) -> dict[str, Comparison]:
    sources = sorted({text.prompt_set for text in before})
    return {
        source: compare(
            [text for text in before if text.prompt_set == source],
            [text for text in after if text.prompt_set == source],
        )
        for source in sources
    }


def decide(evidence: Evidence, margins: Margins) -> Decision:
    """Every rule that is broken, not only the first."""
    against = [
        f"{finding.name}: {finding.message}"
        for finding in evidence.findings
        if finding.gravity is Gravity.UNFIT
    ]
    if evidence.lossless is not None:
        changed = lossless.finding_of(evidence.lossless)
        against += [f"{changed.name}: {changed.message}"] if changed else []
    elif not against:
        against.append("not-lossless: it was not tried")
    if evidence.traffic is not None:
        against += _against_traffic(evidence.traffic, margins)
    elif not against:
        against.append("traffic: it was not tried")
    if evidence.base is not None:
        against += _against_base(evidence.base, evidence.base_by_source, margins)
    elif not against:
        against.append("base: it was not tried")
    if against:
        return Decision(passed=False, reasons=against)
    assert evidence.traffic is not None
    assert evidence.base is not None
    return Decision(
        passed=True,
        reasons=[
            f"traffic: acceptance length {_told(evidence.traffic)}, wanted at least "
            f"{margins.gain:+.1%}",
            f"base: acceptance length {_told(evidence.base)}, wanted at least "
            f"{-margins.base_loss:+.1%}",
        ],
    )


def _against_traffic(traffic: Comparison, margins: Margins) -> list[str]:
    if traffic.change.low >= margins.gain:
        return []
    return [
        f"traffic: acceptance length {_told(traffic)}, wanted at least {margins.gain:+.1%} at the "
        "lower end"
    ]


def _against_base(
    base: Comparison, by_source: dict[str, Comparison], margins: Margins
) -> list[str]:
    """Over all sources, a loss must be surely small; of one, it must not be surely large.

    A single source has few requests: asked for as much certainty, none would ever pass.
    """
    wanted = f"wanted at least {-margins.base_loss:+.1%} at the"
    against = []
    if base.change.low < -margins.base_loss:
        against.append(f"base: acceptance length {_told(base)}, {wanted} lower end")
    against += [
        f"base, {source}: acceptance length {_told(found)}, {wanted} upper end"
        for source, found in by_source.items()
        if found.change.high < -margins.base_loss
    ]
    return against


def _told(found: Comparison) -> str:
    change = found.change
    return (
        f"{found.before.value:.3f} to {found.after.value:.3f}, {change.value:+.1%} "
        f"({change.low:+.1%} to {change.high:+.1%}) over {found.requests} requests"
    )


class _Sums:
    """Accepted drafts and steps of each request."""

    def __init__(self, texts: Sequence[TextAcceptance]) -> None:
        self._accepted = _row([sum(text.at_steps) for text in texts])
        self._steps = _row([len(text.at_steps) for text in texts])

    def length(self, draw: Tensor) -> Tensor:
        """Acceptance length over the requests of each draw."""
        return 1 + self._accepted[draw].sum(-1) / self._steps[draw].sum(-1).clamp(min=1)


def _row(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
