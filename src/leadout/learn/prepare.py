"""Before a cycle trains: what it goes on from, its text, and how many steps its budget allows."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from leadout.check.request import Progress
from leadout.checkpoints import Checkpoint, read_checkpoint
from leadout.checkpoints.fingerprint import fingerprint
from leadout.checkpoints.registry import Registry
from leadout.data.manifest import DataFolder
from leadout.engine.folders import local_folder
from leadout.learn.adapt import (
    VALIDATIONS,
    first_settings,
    require_learnable,
    settings_for,
    steps_for_tokens,
    steps_within,
    validations_within,
    with_steps,
)
from leadout.learn.config import DEFAULT_MINUTES, LearnError
from leadout.learn.mix import make_mix, read_training, write_mix
from leadout.learn.request import LearnRequest
from leadout.learn.traffic import snapshot, split_traffic
from leadout.learn.work import CycleFile, Work
from leadout.pairing import read_target
from leadout.train.config import TrainConfig
from leadout.train.plan import time_steps
from leadout.train.ranks import Ranks
from leadout.train.run import Run, resolve


@dataclass(frozen=True, slots=True)
class Subject:
    """What a cycle goes on from."""

    request: LearnRequest
    target: Path
    target_fingerprint: str
    registry: Registry
    version: int
    drafter: Checkpoint
    replay: DataFolder

    def cycle(self, training: TrainConfig) -> CycleFile:
        request = self.request
        return CycleFile(
            parent=self.version,
            parent_fingerprint=self.registry.manifest(self.version).fingerprint,
            target_fingerprint=self.target_fingerprint,
            traffic=str(request.traffic.absolute()),
            replay=str(request.replay.absolute()),
            config=request.config,
            training=training,
        )


def subject_of(request: LearnRequest) -> Subject:
    """All that can be refused before anything is done."""
    target = local_folder(request.target)
    registry = Registry.opened(request.registry)
    pointer = registry.serving()
    assert pointer is not None
    drafter = read_checkpoint(registry.path(pointer.version))
    require_learnable(drafter)
    found, replay = fingerprint(target), DataFolder(request.replay)
    served_for = registry.manifest(pointer.version).target_fingerprint
    if served_for != found:
        raise LearnError(
            f"--registry {request.registry}: found drafters for another target (fingerprint "
            f"{served_for[:12]}), wanted those for {target} ({found[:12]}); start a registry for "
            f"this one: --start {registry.path(pointer.version)}"
        )
    if replay.job.target_fingerprint != found:
        raise LearnError(
            f"--replay {request.replay}: found answers of {replay.job.target} (fingerprint "
            f"{replay.job.target_fingerprint[:12]}), wanted those of {target} ({found[:12]}): a "
            "drafter learns only from its own target's text; run `leadout data` with this target"
        )
    return Subject(request, target, found, registry, pointer.version, drafter, replay)


def prepare(subject: Subject, work: Work, ranks: Ranks, progress: Progress) -> CycleFile:
    """How this cycle trains: as it did before it was cut off, or chosen now and written down."""
    before = work.cut_off()
    goes_on = before is not None and before.is_same_cycle(subject.cycle(before.training))
    if ranks.agree(goes_on):
        assert before is not None
        return before
    max_length = 0
    if ranks.leads:
        work.begin()
        max_length = _write_text(subject, work)
    max_length = _told(ranks, max_length)
    training = settings_for(subject.drafter, subject.request.config, max_length, subject.version)
    training = _within_budget(subject, work, training, ranks, progress)
    cycle = subject.cycle(training)
    if ranks.leads:
        work.write(cycle)
    return cycle


def make_run(subject: Subject, work: Work, training: TrainConfig, out: Path, ranks: Ranks) -> Run:
    """A run over the cycle's text in the folder `out`."""
    vocab_size = read_target(subject.target).vocab_size
    share = subject.request.config.replay_share
    corpus = read_training(work.mix, training.max_length, share, vocab_size)
    settings = resolve(training, subject.target, corpus, vocab_size)
    return Run(subject.target, corpus, settings, out, ranks, subject.drafter.config)


def _write_text(subject: Subject, work: Work) -> int:
    """Write the mix; returns the length to which sequences are cut."""
    request, drafter = subject.request, subject.drafter
    first = first_settings(drafter.path)
    traffic = split_traffic(
        snapshot(request.traffic, subject.target_fingerprint, work.capture),
        request.config,
        block_size=drafter.config.block_size,
        shortest=first.max_length,
        longest=drafter.config.max_positions,
    )
    share = request.config.replay_share
    write_mix(make_mix(traffic, subject.replay, first, share, subject.version), work.mix)
    shutil.rmtree(work.capture)
    return traffic.max_length


def _within_budget(
    subject: Subject, work: Work, training: TrainConfig, ranks: Ranks, progress: Progress
) -> TrainConfig:
    """The settings with as many steps as minutes or tokens allow."""
    config = subject.request.config
    with tempfile.TemporaryDirectory(dir=work.run if ranks.leads else None) as scratch:
        run = make_run(subject, work, training, Path(scratch), ranks)
        settings, corpus = run.config, run.corpus
        if config.tokens is not None:
            steps, validations = steps_for_tokens(config.tokens, settings, corpus), VALIDATIONS
        else:
            done = progress.stage("timing a few steps", 1)
            timing = time_steps(run)  # on every rank at once, as they will train
            seconds = 60 * (config.minutes or DEFAULT_MINUTES)
            steps = steps_within(seconds, timing, settings, corpus)
            validations = validations_within(seconds, timing, corpus)
            done()
    steps, validations = (_told(ranks, n if ranks.leads else 0) for n in (steps, validations))
    return with_steps(settings, corpus, steps, validations)


def _told(ranks: Ranks, number: int) -> int:
    """The leading rank's number, on every rank; the others give 0."""
    return int(ranks.add(torch.tensor([number])).item())
