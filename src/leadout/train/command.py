"""`leadout train` as a function: resolve, plan or train, export, prove in the engine, report."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from leadout.checkpoints import Format
from leadout.data.manifest import DataFolder
from leadout.evaluate.ranks import Ranks, joined_ranks
from leadout.files import replacing
from leadout.models import local_folder
from leadout.pairing import read_target
from leadout.settings import SettingsError
from leadout.train.config import TrainConfig, TrainError
from leadout.train.export import write_best, write_companions
from leadout.train.plan import Plan, make_plan
from leadout.train.progress import (
    Listener,
    Record,
    TensorBoard,
    TrainProgress,
    TrainReport,
    curves_of,
    read_log,
    require_tensorboard,
    say,
)
from leadout.train.run import WORK, Corpus, Run, complete_settings, read_corpus
from leadout.train.run_state import RunStatus
from leadout.train.served import ServedAcceptance, compare_with_served, require_agreement

RESOLVED = "training.yaml"
DRAFTER = "drafter"
DATA_HASH = "data-hash"
SERVED_PROMPTS = 24
SERVED_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Command:
    target: str
    data: Path
    out: Path
    config: TrainConfig
    format: Format
    resume: bool
    plan: bool
    tensorboard: bool


def carry_out(command: Command) -> TrainReport | Plan | None:
    """The result, or the plan if only that was asked for; None on all ranks but the leading one."""
    if command.tensorboard:
        require_tensorboard()
    target = local_folder(command.target)
    data = DataFolder(command.data)
    vocab_size = read_target(target).vocab_size
    corpus = read_corpus(data, target, command.config, vocab_size)
    config = complete_settings(command.config, target, corpus, vocab_size)
    with joined_ranks() as ranks:
        if command.plan:
            if ranks.is_leader:
                say("timing a few steps of the real run, a minute or so")
            with tempfile.TemporaryDirectory() as scratch:
                plan = make_plan(Run(target, corpus, config, Path(scratch), ranks), data)
            return plan if ranks.is_leader else None
        run = _prepare(command, target, corpus, config, ranks)
        with TrainProgress(run.steps, ranks.is_leader) as progress:
            curves = TensorBoard(run.folder) if command.tensorboard and ranks.is_leader else None
            numbers = run.train(lambda record: _tell([progress, curves], record))
        if curves is not None:
            curves.close()
        if not ranks.is_leader:
            return None
    return _finish(command, run, data, numbers)


def _tell(listeners: Sequence[Listener | None], record: Record) -> None:
    for listener in listeners:
        if listener is not None:
            listener(record)


def _prepare(
    command: Command, target: Path, corpus: Corpus, config: TrainConfig, ranks: Ranks
) -> Run:
    """The run in its folder, which every rank has found fit before the first writes into it."""
    _require_place(command, config)
    _require_same_data(command, corpus)
    ranks.barrier()
    run = Run(target, corpus, config, command.out, ranks)
    if ranks.is_leader:
        run.folder.mkdir(parents=True, exist_ok=True)
        with replacing(run.folder / DATA_HASH) as temporary:
            temporary.write_text(corpus.content_hash)
        config.write(command.out / RESOLVED)
    return run


def _require_same_data(command: Command, corpus: Corpus) -> None:
    """Kept states and the order of samples belong to one set of samples."""
    path = command.out / WORK / DATA_HASH
    if command.resume and path.exists() and path.read_text() != corpus.content_hash:
        raise TrainError(
            f"--data {command.data}: found other samples (hash {corpus.content_hash[:12]}) than "
            f"the run in {command.out} began with ({path.read_text()[:12]}), wanted the same; "
            "give that data, or start another run"
        )


def _require_place(command: Command, config: TrainConfig) -> None:
    """A new run needs a new folder, a continued one the same settings."""
    resolved = command.out / RESOLVED
    if not command.resume:
        if resolved.exists():
            raise TrainError(
                f"--out {command.out}: found a run in it, wanted a new folder; give --resume to "
                "continue it, or another folder"
            )
        return
    if not resolved.exists():
        raise TrainError(
            f"--out {command.out}: found no {RESOLVED}, wanted a run to continue; leave --resume "
            "out to start one"
        )
    before = TrainConfig.resolve({}, resolved)
    for name in TrainConfig.model_fields:
        old, new = getattr(before, name), getattr(config, name)
        if old != new and name not in _MAY_CHANGE:
            raise SettingsError(
                f"--{name.replace('_', '-')}: found {new!r}, the run in {command.out} has {old!r}; "
                "a continued run keeps its settings: repeat them, or start another run"
            )


# How often it looks and writes, and in what portions it computes, is not what it computes.
_MAY_CHANGE = frozenset({"save_every", "validate_every", "micro_tokens", "compile", "patience"})


def _finish(command: Command, run: Run, data: DataFolder, numbers: RunStatus) -> TrainReport:
    """Export the best weights, prove them in the engine, and write what belongs to a drafter."""
    folder = write_best(run, command.out / DRAFTER, command.format, command.target)
    say(f"wrote {folder}; now vLLM serves it on held-out prompts, a minute or two")
    served = serve_held_out(run, local_folder(command.target), folder)
    validation = curves_of(read_log(run.folder)).best
    report = TrainReport(
        target=data.job.target,
        drafter=str(folder),
        steps=numbers.step,
        best_step=numbers.best_step,
        minutes=numbers.seconds / 60,
        data_hash=run.corpus.content_hash,
        response_tokens=data.response_tokens,
        config=run.config,
        validation=validation,
        served=served,
        target_fingerprint=data.job.target_fingerprint,
        template_hash=data.job.template_hash,
        thinking=data.job.thinking,
    )
    write_companions(folder, report, data, list(read_log(run.folder)))
    require_agreement(served, folder)
    return report


def serve_held_out(run: Run, target: Path, drafter: Path) -> ServedAcceptance:
    """A short decode of held-out prompts, spread over the sources."""
    indices = run.corpus.split.validation
    count = min(SERVED_PROMPTS, len(indices))
    chosen = [indices[place * len(indices) // count] for place in range(count)]
    prompts = [run.corpus.samples[index].prompt for index in chosen]
    longest = max(len(prompt) for prompt in prompts)
    most = run.drafter_config.max_positions
    length = min(longest + SERVED_TOKENS + run.config.block_size, most)
    return compare_with_served(
        target,
        drafter,
        prompts,
        max_tokens=min(SERVED_TOKENS, length - longest),
        max_length=length,
        precision=getattr(torch, run.config.precision),
    )
