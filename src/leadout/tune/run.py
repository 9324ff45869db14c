"""`leadout tune` as a function: measure a pair on this machine, and choose draft lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from leadout.checkpoints import Checkpoint, read_checkpoint
from leadout.console import Progress
from leadout.control.tuned_file import Acceptance, Model, Tuned, choose_table
from leadout.data.chat import Chat
from leadout.engine.calibration import (
    DRAFTING_STEPS,
    CalibrationRequest,
    CalibrationResult,
    RoundRequest,
    RoundResult,
    Turn,
    calibrate,
)
from leadout.errors import StoppedError
from leadout.evaluate.prompts import prompts_or_default
from leadout.files import require_writable
from leadout.findings import Severity
from leadout.models import fingerprint, local_folder
from leadout.pairing import Pair, examine, read_target
from leadout.provenance import Provenance, RunStart
from leadout.stats import Interval, Sampled
from leadout.tune.fit import Accepted, StepLaw, fit_acceptance, fit_prefill, fit_steps
from leadout.tune.plan import TOKENS, TunePlan, make_plan, make_rounds
from leadout.tune.settings import TuneError, TuneSettings

# Prompts are read again in every round; longer ones would take more time than decoding.
MAX_PROMPT = 512


@dataclass(frozen=True, slots=True)
class Preparation:
    """Everything that is known before an engine starts."""

    target: Path
    drafter: Path
    checkpoint: Checkpoint
    prompts: list[list[int]]
    rounds: list[RoundRequest]
    max_length: int


def plan(settings: TuneSettings) -> TunePlan:
    ready = prepare(settings)
    return make_plan(ready.target, ready.drafter, ready.rounds, list(map(len, ready.prompts)))


def tune(settings: TuneSettings, progress: Progress, tokens: int = TOKENS) -> Tuned:
    started = RunStart.now()
    ready = prepare(settings)
    max_k = ready.checkpoint.config.max_draft_tokens
    subject = Subject(  # before the measurement: files may be replaced while it runs
        target=Model(name=settings.target, fingerprint=fingerprint(ready.target)),
        drafter=Model(name=settings.drafter, fingerprint=fingerprint(ready.drafter)),
        block_size=max_k + 1,
    )
    advance = progress.stage("start engines and measure", 2 + len(ready.rounds))
    try:
        result = calibrate(
            CalibrationRequest(
                target=str(ready.target),
                drafter=str(ready.drafter),
                draft_tokens=max_k,
                prompts=ready.prompts,
                rounds=ready.rounds,
                tokens=tokens,
                max_length=ready.max_length,
                dtype=settings.dtype,
            ),
            lambda message: advance(note=message),
        )
    except KeyboardInterrupt:
        raise StoppedError(
            "stopped by Ctrl-C. A tuning keeps no partial results: run the same command again, or "
            "with a smaller --max-batch to take less time."
        ) from None
    return summarize(result, subject, started)


def prepare(settings: TuneSettings) -> Preparation:
    """Read every file, so that mistakes are reported before an engine starts."""
    if settings.out.is_dir():
        raise TuneError(f"--out {settings.out} is a folder, expected a file name.")
    require_writable("--out", settings.out)
    target, drafter = local_folder(settings.target), local_folder(settings.drafter)
    checkpoint = read_checkpoint(drafter, as_served=True)
    facts = read_target(target, settings.target)
    refused = [
        str(finding)
        for finding in examine(Pair(target=facts, drafter=checkpoint, settings=None))
        if finding.severity is Severity.ERROR
    ]
    if refused:
        raise TuneError("target and drafter do not fit:\n" + "\n".join(refused))
    max_k = checkpoint.config.max_draft_tokens
    positions = checkpoint.config.max_positions
    longest = min(facts.max_positions or positions, positions)
    answer = (TOKENS + 2 * DRAFTING_STEPS) * (max_k + 1)
    prompts = _prompts(settings, Chat(target), min(MAX_PROMPT, max(longest - answer, longest // 2)))
    return Preparation(
        target=target,
        drafter=drafter,
        checkpoint=checkpoint,
        prompts=prompts,
        rounds=make_rounds(settings.max_batch, max_k, len(prompts)),
        max_length=min(longest, max(map(len, prompts)) + answer),
    )


def _prompts(settings: TuneSettings, chat: Chat, max_tokens: int) -> list[list[int]]:
    rendered = [chat.prompt(prompt.turns[:1]) for prompt in prompts_or_default(settings.prompts)]
    kept = [tokens for tokens in rendered if len(tokens) <= max_tokens]
    if not kept:
        raise TuneError(
            f"--prompts: every prompt is longer than {max_tokens} tokens; add shorter ones."
        )
    return kept


@dataclass(frozen=True, slots=True)
class Subject:
    """The measured pair."""

    target: Model
    drafter: Model
    block_size: int


def summarize(
    result: CalibrationResult, subject: Subject, started: RunStart | None = None
) -> Tuned:
    """From measured steps to curves with intervals, and from those to the table."""
    batches = sorted({each.batch for each in result.rounds})
    laws = {batch: fit_steps(_turns(result.rounds, batch), seed=batch) for batch in batches}
    accepted = fit_acceptance(result.rounds)
    speedup = {batch: speedups(law, accepted) for batch, law in laws.items()}
    max_batch = max(laws)
    table = choose_table(speedup, max_batch)
    models = {"target": subject.target.fingerprint, "drafter": subject.drafter.fingerprint}
    return Tuned(
        provenance=Provenance.of_this_run(models, started),
        target=subject.target,
        drafter=subject.drafter,
        dtype=result.dtype,
        block_size=subject.block_size,
        runner=result.runner,
        max_batch=max_batch,
        verify={batch: _verify_seconds(law) for batch, law in laws.items()},
        draft={batch: _seconds(law.draft, law) for batch, law in laws.items()},
        acceptance=Acceptance(
            tokens={k: found.interval() for k, found in accepted.tokens.items()},
            by_position=[found.interval() for found in accepted.by_position],
            requests=accepted.requests,
            steps=accepted.steps,
        ),
        speedup=speedup,
        prefill_bare=fit_prefill([s for each in result.rounds for s in each.prefill_bare]),
        prefill_drafting=fit_prefill([s for each in result.rounds for s in each.prefill_drafting]),
        table=table.ranges(),
        break_even=table.break_even,
        loses_above=table.loses_above,
    )


def speedups(law: StepLaw, accepted: Accepted) -> dict[int, Interval]:
    """Tokens per step divided by the length of a step in bare steps, by K."""
    measured = sorted(set(accepted.tokens) & set(law.draft) & set(law.verify))
    return {k: (accepted.tokens[k] / law.step(k)).interval() for k in measured}


def _verify_seconds(law: StepLaw) -> dict[int, Interval]:
    return {**_seconds(law.verify, law), 0: law.bare.interval()}


def _seconds(curve: Mapping[int, Sampled], law: StepLaw) -> dict[int, Interval]:
    """With the interval of the ratio to a bare step, which drifts much less than seconds do."""
    bare = law.bare.values[0].item()
    return {place: found.interval().times(bare) for place, found in curve.items()}


def _turns(rounds: Sequence[RoundResult], batch: int) -> list[Turn]:
    return [turn for each in rounds if each.batch == batch for turn in each.turns]
