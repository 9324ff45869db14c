"""The gate: whether a candidate may replace the serving drafter.

`evaluate` measures a candidate, `decide` is a pure function of what was measured. Confidence
intervals come from a bootstrap over requests, paired: each resample has the same requests for both
drafters. A limit holds only if the lower bound is above it.

On the base, a candidate is compared with the serving version and with the first version of the
registry. Compared with the serving version alone, each cycle could lose what is allowed once more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from leadout.check import lossless
from leadout.check.lossless import compare_answers
from leadout.check.result import Lossless
from leadout.check.static import served_dtype, static_findings
from leadout.checkpoints import Checkpoint, CheckpointError, read_checkpoint
from leadout.console import Progress
from leadout.control.rollback import Acceptance, Tally
from leadout.engine.offline import SessionRequest, run_session
from leadout.evaluate.acceptance import (
    TextAcceptance,
    acceptance_by_drafter,
    served_draft_tokens,
)
from leadout.evaluate.hidden_states import StateSource
from leadout.evaluate.ranks import empty_device_cache
from leadout.evaluate.reference import (
    is_quantized,
    reference_device,
    reference_target,
    rounding_of,
)
from leadout.findings import Finding, Severity
from leadout.learn.config import CycleSettings, Record
from leadout.registry import FIRST, RequestAcceptance
from leadout.shards import Sample
from leadout.stats import LEVEL, Floats, Indices, Interval, bootstrap
from leadout.train.run import evenly_spaced

LOSSLESS_PROMPTS = 8  # from the traffic, and as many from the base
LOSSLESS_TOKENS = 64
MIN_REQUESTS = 20  # a bootstrap over fewer has too small intervals
POWER = 0.9  # probability that the number of requests that is called enough decides
MAX_FACTOR = 10  # more requests than this many times the measured ones are not proposed
_SINCE_FIRST = f"base since version {FIRST}"

LosslessCheck = Callable[[Path, Path, Sequence[Sample]], Lossless]


class Comparison(Record):
    """Acceptance lengths of an earlier version and the candidate on the same requests."""

    requests: int
    before: Interval
    after: Interval
    change: Interval  # relative to before


class Evidence(Record):
    """What was measured on a candidate; None if its files already ruled out running it."""

    findings: list[Finding]
    traffic: Comparison | None = None
    base: Comparison | None = None  # with the serving version
    base_by_source: dict[str, Comparison] = Field(default_factory=dict)
    first: Comparison | None = None  # with the first version, on the base
    first_by_source: dict[str, Comparison] = Field(default_factory=dict)
    lossless: Lossless | None = None
    lossless_left_out: str | None = None  # why vLLM was not run with and without the candidate
    # On the traffic, as servers count requests.
    served_before: RequestAcceptance | None = None
    served_after: RequestAcceptance | None = None


class Decision(Record):
    """Undecided: no rule is known to be broken, but some need more requests to be decided."""

    verdict: Literal["passed", "rejected", "undecided"]
    reasons: list[str]  # why it passed, or every rule that it breaks or that is undecided
    enough: dict[str, int] = Field(default_factory=dict)  # requests, by undecided rule

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"


def compare(before: Sequence[TextAcceptance], after: Sequence[TextAcceptance]) -> Comparison:
    """Acceptance length over all decoding steps of all requests."""
    old, new, count = _acceptance_length(before), _acceptance_length(after), len(before)
    return Comparison(
        requests=count,
        before=bootstrap(count, old),
        after=bootstrap(count, new),
        change=bootstrap(count, lambda drawn: new(drawn) / old(drawn) - 1),
    )


def as_served(texts: Sequence[TextAcceptance]) -> RequestAcceptance | None:
    """The acceptance length as servers count it; None for too few requests."""
    tally = Tally()
    for text in texts:
        if text.at_steps:
            steps = len(text.at_steps)
            tally = tally.with_request(steps, steps + sum(text.at_steps))
    found = Acceptance.of(tally)
    return None if found is None else RequestAcceptance(**dataclasses.asdict(found))


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


class _Rule(NamedTuple):
    """The lower bound of a comparison must be above a limit."""

    name: str
    comparison: Comparison | None
    limit: float


def _rules(evidence: Evidence, settings: CycleSettings) -> Iterator[_Rule]:
    yield _Rule("traffic", evidence.traffic, settings.gain)
    yield _Rule("base", evidence.base, -settings.base_loss)
    if evidence.first is None or evidence.first != evidence.base:  # equal in the first cycle
        yield _Rule(_SINCE_FIRST, evidence.first, -settings.base_loss)


def decide(evidence: Evidence, settings: CycleSettings) -> Decision:
    """The decision, with every rule that is broken and not only the first."""
    broken = [
        f"{finding.name}: {finding.message}"
        for finding in evidence.findings
        if finding.severity is Severity.ERROR
    ]
    if evidence.lossless is not None:
        changed = lossless.finding_of(evidence.lossless)
        broken += [f"{changed.name}: {changed.message}"] if changed else []
    elif not broken and evidence.lossless_left_out is None:
        broken.append("not-lossless: not measured")
    ran = not broken or evidence.lossless is not None
    kept: list[str] = []
    undecided: list[str] = []
    enough: dict[str, int] = {}
    for name, comparison, limit in _rules(evidence, settings):
        if comparison is None:
            broken += [f"{name}: not measured"] if ran else []
            continue
        measured = f"{name}: {_described(comparison)}; "
        if is_above(comparison, limit):
            kept.append(f"{measured}required: above {limit:+.1%}")
            continue
        measured += f"the lower bound must be above {limit:+.1%}"
        needed = requests_enough(comparison, limit)
        if needed is None:
            broken.append(measured)
        else:
            enough[name] = needed
            more = "capture more traffic" if name == "traffic" else f"--base-sequences {needed}"
            undecided.append(f"{measured}; {needed} requests are probably enough: {more}")
    broken += _lost_sources("base", evidence.base_by_source, settings.base_loss)
    if evidence.first_by_source != evidence.base_by_source:
        broken += _lost_sources(_SINCE_FIRST, evidence.first_by_source, settings.base_loss)
    if broken:
        return Decision(verdict="rejected", reasons=broken + undecided, enough=enough)
    if undecided:
        return Decision(verdict="undecided", reasons=undecided, enough=enough)
    if evidence.lossless_left_out is not None:
        kept.append(f"lossless: left out, {evidence.lossless_left_out}")
    return Decision(verdict="passed", reasons=kept)


def is_above(comparison: Comparison, limit: float) -> bool:
    return comparison.requests >= MIN_REQUESTS and comparison.change.low > limit


def requests_enough(comparison: Comparison, limit: float) -> int | None:
    """How many requests would show that the change is above the limit, if it is as measured.

    None if it is below the limit, or so close that many times more requests would be needed.
    """
    change, requests = comparison.change, comparison.requests
    margin = change.value - limit
    if margin <= 0:
        return None
    # The bound is `bound` standard errors below the estimate, which itself varies by one.
    bound, power = NormalDist().inv_cdf((1 + LEVEL) / 2), NormalDist().inv_cdf(POWER)
    half_width = (change.value - change.low) * (1 + power / bound)
    needed = max(MIN_REQUESTS, math.ceil(requests * (half_width / margin) ** 2))
    return needed if needed <= MAX_FACTOR * max(requests, MIN_REQUESTS) else None


def _lost_sources(name: str, by_source: dict[str, Comparison], max_loss: float) -> list[str]:
    """Over all sources the loss must be shown to be small; for one, it must not be shown large.

    A single source has too few requests for an interval as small as that over all of them.
    """
    return [
        f"{name}, {source}: {_described(comparison)}; the upper bound must be at least "
        f"{-max_loss:+.1%}"
        for source, comparison in by_source.items()
        if comparison.change.high < -max_loss
    ]


def _described(comparison: Comparison) -> str:
    change = comparison.change
    return (
        f"acceptance length {comparison.before.value:.3f} -> {comparison.after.value:.3f}, "
        f"{change.value:+.1%} (95% interval {change.low:+.1%} to {change.high:+.1%}) over "
        f"{comparison.requests} requests"
    )


def _acceptance_length(texts: Sequence[TextAcceptance]) -> Callable[[Indices], Floats]:
    """Acceptance length over the requests `drawn` [..., requests] of each resample."""
    accepted = np.array([sum(text.at_steps) for text in texts], dtype=np.float64)
    steps = np.array([len(text.at_steps) for text in texts], dtype=np.float64)

    def length(drawn: Indices) -> Floats:
        return np.asarray(1 + accepted[drawn].sum(-1) / np.maximum(steps[drawn].sum(-1), 1))

    return length


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A candidate, the versions to compare it with, and the requests to compare them on."""

    target: Path
    first: Path  # may be the serving one
    serving: Path
    candidate: Path
    held_out: Sequence[Sample]
    base: Sequence[Sample]
    max_length: int
    device: torch.device
    states_from: Sequence[str] = ()  # servers of hidden states
    vllm_flags: Sequence[str] = ()  # of a server of hidden states that is started
    states: StateSource | None = None  # of all these requests, if they are known already


def evaluate(trial: Trial, check: LosslessCheck | str, progress: Progress) -> Evidence:
    """Measure a candidate; one whose files already rule it out is not run.

    In place of `check` there may be the reason why that check is left out.
    """
    findings = static_findings(trial.target, trial.candidate)
    findings += shape_findings(read_checkpoint(trial.serving), trial.candidate)
    if any(finding.severity is Severity.ERROR for finding in findings):
        return Evidence(findings=findings)
    samples = [*trial.held_out, *trial.base]
    more = [] if trial.first == trial.serving else [trial.first]
    before, after, *of_first = acceptance_by_drafter(
        trial.target,
        [trial.serving, trial.candidate, *more],
        samples,
        trial.max_length,
        trial.device,
        progress.stage("comparing drafters", len(samples)),
        trial.states_from,
        trial.vllm_flags,
        trial.states,
    )
    newest = len(trial.held_out)
    (first,) = of_first or [before]
    empty_device_cache()  # the engine starts on the accelerator that the comparison used
    answers, left_out = None, None
    if isinstance(check, str):
        left_out = check
    else:
        done = progress.stage("vLLM with and without it", 1)
        some = [
            sample
            for part in (trial.held_out, trial.base)
            for sample in evenly_spaced(part, LOSSLESS_PROMPTS)
        ]
        answers = check(trial.target, trial.candidate, some)
        done()
    return Evidence(
        findings=findings,
        traffic=compare(before[:newest], after[:newest]),
        base=compare(before[newest:], after[newest:]),
        base_by_source=compare_by_source(before[newest:], after[newest:]),
        first=compare(first[newest:], after[newest:]),
        first_by_source=compare_by_source(first[newest:], after[newest:]),
        lossless=answers,
        lossless_left_out=left_out,
        served_before=as_served(before[:newest]),
        served_after=as_served(after[:newest]),
    )


def shape_findings(serving: Checkpoint, candidate: Path) -> list[Finding]:
    """A running server can replace the weights of a drafter, but not its configuration."""
    try:
        found = read_checkpoint(candidate).config
    except CheckpointError:
        return []  # already another finding
    expected = serving.config
    return [
        Finding(
            name="shape",
            severity=Severity.ERROR,
            message=(
                f"{field.name} is {getattr(found, field.name)}, but "
                f"{getattr(expected, field.name)} in the serving drafter"
            ),
            remedy="Create a separate registry for a drafter of another shape.",
        )
        for field in dataclasses.fields(expected)
        if getattr(found, field.name) != getattr(expected, field.name)
    ]


def check_lossless(
    target: Path,
    drafter: Path,
    samples: Sequence[Sample],
    urls: Sequence[str] = (),
    vllm_flags: Sequence[str] = (),
) -> Lossless:
    """Compare vLLM's greedy answers with and without the drafter, in child processes.

    They are written in float32, or, since vLLM has few kernels in float32 for quantized weights, in
    the precision of a target that has these.
    """
    dtype = served_dtype(target, "auto") if is_quantized(target, vllm_flags) else "float32"
    precision: torch.dtype = getattr(torch, dtype)
    drafts = served_draft_tokens(drafter)
    max_prompt = read_checkpoint(drafter).config.max_positions - LOSSLESS_TOKENS - drafts
    prompts = {"held out": [sample.prompt[-max_prompt:] for sample in samples]}
    longest = max(len(prompt) for prompt in prompts["held out"])
    alone = SessionRequest(
        target=str(target),
        prompts=prompts,
        max_tokens=LOSSLESS_TOKENS,
        max_length=longest + LOSSLESS_TOKENS + drafts,
        dtype=dtype,
        vllm_flags=list(vllm_flags),
    )
    together = alone.model_copy(update={"drafter": str(drafter), "draft_tokens": drafts})
    (bare,) = run_session(alone).runs
    (speculative,) = run_session(together).runs
    if bare.answers == speculative.answers:
        count = len(samples)
        return Lossless(texts=count, equal_texts=count, divergences=[], largest_allowed_gap=0.0)
    longest_text = longest + LOSSLESS_TOKENS
    with reference_target(
        target,
        (),
        precision,
        longest=longest_text,
        device=reference_device(target, precision, vllm_flags),
        urls=urls,
        vllm_flags=vllm_flags,
    ) as reference:
        return compare_answers(
            reference,
            prompts,
            {"held out": bare.answers},
            {"held out": speculative.answers},
            rounding_of(target, precision, vllm_flags),
            drafts + 1,
        )
