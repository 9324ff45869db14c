"""Everything that the gate wants to know of a candidate."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from leadout.check.findings import Finding, Gravity
from leadout.check.lossless import compare_answers
from leadout.check.request import Progress
from leadout.check.result import Lossless
from leadout.check.static import static_findings
from leadout.checkpoints import Checkpoint, CheckpointError, read_checkpoint
from leadout.engine.session import SessionRequest, run_session_apart
from leadout.learn.gate import Evidence, compare, compare_by_source
from leadout.learn.judge import judge, served_drafts
from leadout.learn.traffic import spread
from leadout.shards import Sample
from leadout.train.states import load_model

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
    if any(finding.gravity is Gravity.UNFIT for finding in findings):
        return Evidence(findings=findings)
    samples = [*trial.held_out, *trial.base]
    before, after = judge(
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
            gravity=Gravity.UNFIT,
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
    drafts = served_drafts(drafter)
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
    (bare,) = run_session_apart(alone).runs
    (speculative,) = run_session_apart(together).runs
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
