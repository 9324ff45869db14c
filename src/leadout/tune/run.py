"""From what the engines did to curves with intervals, and from those to the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from leadout.checkpoints import Checkpoint, read_checkpoint
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
from leadout.evaluate.prompts import prompts_or_default
from leadout.findings import Severity
from leadout.models import fingerprint, local_folder
from leadout.pairing import Pair, examine, read_target
from leadout.provenance import Provenance
from leadout.stats import Interval, Sampled
from leadout.tune.fit import Accepted, StepLaw, fit_acceptance, fit_prefill, fit_steps
from leadout.tune.settings import (
    TOKENS,
    Progress,
    TuneError,
    TunePlan,
    TuneRequest,
    make_plan,
    make_rounds,
)


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured."""

    target: Model
    drafter: Model
    block_size: int


def tuned_of(result: CalibrationResult, subject: Subject) -> Tuned:
    laws = {batch: fit_steps(_turns(result.rounds, batch), seed=batch) for batch in _sizes(result)}
    accepted = fit_acceptance(result.rounds)
    speedup = {batch: speedups(law, accepted) for batch, law in laws.items()}
    max_batch = max(laws)
    table = choose_table(speedup, max_batch)
    return Tuned(
        provenance=Provenance.of_this_run(),
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
    """Tokens of a step over its length in bare steps, by K; both uncertain."""
    measured = sorted(set(accepted.tokens) & set(law.draft) & set(law.verify))
    return {k: (accepted.tokens[k] / law.step(k)).interval() for k in measured}


def _verify_seconds(law: StepLaw) -> dict[int, Interval]:
    return {**_seconds(law.verify, law), 0: law.bare.interval()}


def _seconds(curve: Mapping[int, Sampled], law: StepLaw) -> dict[int, Interval]:
    """The spread is that of the ratio to a bare step: machines drift, ratios much less."""
    bare = law.bare.values[0].item()
    return {place: found.interval().times(bare) for place, found in curve.items()}


def _turns(rounds: Sequence[RoundResult], batch: int) -> list[Turn]:
    return [turn for each in rounds if each.batch == batch for turn in each.turns]


def _sizes(result: CalibrationResult) -> list[int]:
    return sorted({each.batch for each in result.rounds})


# `leadout tune` as a function: measure a pair here, and choose the draft lengths.

# Prompts are read anew in every round; longer ones would take more time than the decoding.
MAX_PROMPT = 512


@dataclass(frozen=True, slots=True)
class Preparation:
    """All that is known before an engine starts."""

    target: Path
    drafter: Path
    checkpoint: Checkpoint
    prompts: list[list[int]]
    rounds: list[RoundRequest]
    max_length: int


def plan(request: TuneRequest) -> TunePlan:
    ready = prepare(request)
    return make_plan(ready.target, ready.rounds, len(ready.prompts))


def tune(request: TuneRequest, progress: Progress, tokens: int = TOKENS) -> Tuned:
    ready = prepare(request)
    most = ready.checkpoint.config.max_draft_tokens
    subject = Subject(  # before the measurement: nobody measures what is put there meanwhile
        target=Model(name=request.target, fingerprint=fingerprint(ready.target)),
        drafter=Model(name=request.drafter, fingerprint=fingerprint(ready.drafter)),
        block_size=most + 1,
    )
    done = progress.stage("bare and drafting engine in turns", 2 + len(ready.rounds))
    result = calibrate(
        CalibrationRequest(
            target=str(ready.target),
            drafter=str(ready.drafter),
            draft_tokens=most,
            prompts=ready.prompts,
            rounds=ready.rounds,
            tokens=tokens,
            max_length=ready.max_length,
            dtype=request.dtype,
        ),
        lambda _: done(),
    )
    return tuned_of(result, subject)


def prepare(request: TuneRequest) -> Preparation:
    target, drafter = local_folder(request.target), local_folder(request.drafter)
    checkpoint, facts = read_checkpoint(drafter), read_target(target, request.target)
    refused = [
        str(finding)
        for finding in examine(Pair(target=facts, drafter=checkpoint, settings=None))
        if finding.severity is Severity.ERROR
    ]
    if refused:
        raise TuneError("target and drafter do not fit\n" + "\n".join(refused))
    most = checkpoint.config.max_draft_tokens
    positions = checkpoint.config.max_positions
    longest = min(facts.max_positions or positions, positions)
    room = (TOKENS + 2 * DRAFTING_STEPS) * (most + 1)
    most_prompt = min(MAX_PROMPT, max(longest - room, longest // 2))
    prompts = _prompts(request, Chat(target), most_prompt)
    return Preparation(
        target=target,
        drafter=drafter,
        checkpoint=checkpoint,
        prompts=prompts,
        rounds=make_rounds(request.max_batch, most, len(prompts)),
        max_length=min(longest, max(map(len, prompts)) + room),
    )


def _prompts(request: TuneRequest, chat: Chat, most: int) -> list[list[int]]:
    rendered = [chat.prompt(prompt.turns[:1]) for prompt in prompts_or_default(request.prompts)]
    kept = [tokens for tokens in rendered if len(tokens) <= most]
    if not kept:
        raise TuneError(
            f"--prompts: found none of at most {most} tokens, wanted some; give shorter ones"
        )
    return kept
