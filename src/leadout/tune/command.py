"""`leadout tune` as a function: measure a pair here, and choose the draft lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from leadout.check.prompts import default_or_given
from leadout.checkpoints import Checkpoint, read_checkpoint
from leadout.checkpoints.fingerprint import fingerprint
from leadout.control.tuned import Model, Tuned
from leadout.data.chat import Chat
from leadout.engine.calibration import (
    DRAFTING_STEPS,
    CalibrationRequest,
    RoundRequest,
    calibrate_apart,
)
from leadout.engine.folders import local_folder
from leadout.pairing import Pair, Severity, examine, read_target
from leadout.tune.measure import Subject, tuned_of
from leadout.tune.plan import TOKENS, TunePlan, make_plan, make_rounds
from leadout.tune.request import Progress, TuneError, TuneRequest

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
    result = calibrate_apart(
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
        if finding.severity is Severity.REFUSE
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
    rendered = [chat.prompt(prompt.turns[:1]) for prompt in default_or_given(request.prompts)]
    kept = [tokens for tokens in rendered if len(tokens) <= most]
    if not kept:
        raise TuneError(
            f"--prompts: found none of at most {most} tokens, wanted some; give shorter ones"
        )
    return kept
