"""Whether a candidate may take the serving drafter's place: a pure function of what was measured.

Requests, not tokens, are drawn again for the intervals, and both drafters are judged on the same
requests of each draw.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from leadout.check import lossless
from leadout.check.lossless import compare_answers
from leadout.check.result import Lossless
from leadout.check.static import static_findings
from leadout.checkpoints import Checkpoint, CheckpointError, read_checkpoint
from leadout.console import Progress
from leadout.engine.offline import SessionRequest, run_session
from leadout.evaluate.acceptance import TextAcceptance
from leadout.evaluate.compare import acceptance_by_drafter, served_draft_tokens
from leadout.evaluate.hidden_states import load_model
from leadout.findings import Finding, Severity
from leadout.learn.data import spread
from leadout.shards import Sample
from leadout.stats import Floats, Indices, Interval, bootstrap


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
        if finding.severity is Severity.ERROR
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
        self._accepted = np.array([sum(text.at_steps) for text in texts], dtype=np.float64)
        self._steps = np.array([len(text.at_steps) for text in texts], dtype=np.float64)

    def length(self, drawn: Indices) -> Floats:
        """Acceptance length over the requests of each draw."""
        steps = np.maximum(self._steps[drawn].sum(-1), 1)
        return np.asarray(1 + self._accepted[drawn].sum(-1) / steps)


# Everything that the gate wants to know of a candidate.

PROVED_PROMPTS = 8  # of the traffic, and as many of the base
PROVED_TOKENS = 64

Prove = Callable[[Path, Path, Sequence[Sample]], Lossless]


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A candidate, what it would replace, and the requests to judge both by."""

    target: Path
    serving: Path
    candidate: Path
    held_out: Sequence[Sample]
    base: Sequence[Sample]
    max_length: int
    device: torch.device


def gather(trial: Trial, prove: Prove, progress: Progress) -> Evidence:
    """What files forbid to run is not run."""
    findings = static_findings(trial.target, trial.candidate)
    findings += shape_findings(read_checkpoint(trial.serving), trial.candidate)
    if any(finding.severity is Severity.ERROR for finding in findings):
        return Evidence(findings=findings)
    samples = [*trial.held_out, *trial.base]
    before, after = acceptance_by_drafter(
        trial.target,
        [trial.serving, trial.candidate],
        samples,
        trial.max_length,
        trial.device,
        progress.stage("held-out requests, with both drafters", len(samples)),
    )
    newest = len(trial.held_out)
    _make_room()
    done = progress.stage("vLLM with and without the candidate", 1)
    proof = prove(trial.target, trial.candidate, [*_some(trial.held_out), *_some(trial.base)])
    done()
    return Evidence(
        findings=findings,
        traffic=compare(before[:newest], after[:newest]),
        base=compare(before[newest:], after[newest:]),
        base_by_source=compare_by_source(before[newest:], after[newest:]),
        lossless=proof,
    )


def shape_findings(serving: Checkpoint, candidate: Path) -> list[Finding]:
    """A running server replaces weights, not what they are computed with."""
    try:
        found = read_checkpoint(candidate).config
    except CheckpointError:
        return []  # another finding already
    wanted = serving.config
    return [
        Finding(
            name="shape",
            severity=Severity.ERROR,
            message=(
                f"found {field.name} {getattr(found, field.name)}, wanted "
                f"{getattr(wanted, field.name)} as in the drafter that is served"
            ),
            remedy="Start a registry of its own for a drafter of another shape.",
        )
        for field in dataclasses.fields(wanted)
        if getattr(found, field.name) != getattr(wanted, field.name)
    ]


def prove_lossless(target: Path, drafter: Path, samples: Sequence[Sample]) -> Lossless:
    """Greedy answers in float32, with and without the drafter, each in a process of its own."""
    drafts = served_draft_tokens(drafter)
    room = read_checkpoint(drafter).config.max_positions - PROVED_TOKENS - drafts
    prompts = {"held out": [sample.prompt[-room:] for sample in samples]}
    longest = max(len(prompt) for prompt in prompts["held out"])
    alone = SessionRequest(
        target=str(target),
        prompts=prompts,
        max_tokens=PROVED_TOKENS,
        max_length=longest + PROVED_TOKENS + drafts,
        dtype="float32",
    )
    together = alone.model_copy(update={"drafter": str(drafter), "draft_tokens": drafts})
    (bare,) = run_session(alone).runs
    (speculative,) = run_session(together).runs
    if bare.answers == speculative.answers:
        count = len(samples)
        return Lossless(texts=count, equal_texts=count, divergences=[], largest_allowed_gap=0.0)
    return compare_answers(
        load_model(target, torch.float32),
        prompts,
        {"held out": bare.answers},
        {"held out": speculative.answers},
        torch.float32,
        drafts + 1,
    )


def _make_room() -> None:
    """The engine starts on the same accelerator as the judging."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _some(samples: Sequence[Sample]) -> list[Sample]:
    return [samples[index] for index in spread(range(len(samples)), PROVED_PROMPTS)]
