"""The folder that a cycle works in: another cycle keeps out, and one that was cut off goes on.

    work/
      lock
      cycle.json     what the cycle was asked for and how it trains; written when all else is there
      mix/           the text to train on and to judge by; gone when the cycle ends
      run/           the training run
      candidate/     the drafter that the gate judges

Everything in it may show what users wrote, so it is readable by the owner only.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from leadout.checkpoints import Checkpoint, read_checkpoint
from leadout.console import Progress
from leadout.data.manifest import DataFolder
from leadout.evaluate.ranks import Ranks
from leadout.files import replacing
from leadout.learn.config import DEFAULT_MINUTES, LearnConfig, LearnError, LearnRequest
from leadout.learn.data import make_mix, read_training, snapshot, split_traffic, write_mix
from leadout.models import fingerprint, local_folder
from leadout.pairing import read_target
from leadout.registry import Registry
from leadout.train.config import TrainConfig
from leadout.train.export import SETTINGS
from leadout.train.loop import total_steps
from leadout.train.plan import Timing, time_steps
from leadout.train.run import STATES, WORK, Corpus, Run, complete_settings

CYCLE = "cycle.json"
LOCK = "lock"


class CycleFile(BaseModel):
    """All that a cycle depends on; one that was cut off goes on only with the same."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parent: int
    parent_fingerprint: str
    target_fingerprint: str
    traffic: str
    replay: str
    config: LearnConfig
    training: TrainConfig

    def is_same_cycle(self, other: CycleFile) -> bool:
        """Whatever was chosen on the way."""
        return self == other.model_copy(update={"training": self.training})


class Work:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mix = folder / "mix"
        self.capture = folder / "capture"
        self.run = folder / WORK
        self.candidate = folder / "candidate"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone in this folder; the lock dies with the process."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise LearnError(
                f"--work {self.folder}: found another cycle at work in it, wanted it free; wait "
                "for its end, or give another folder"
            ) from None
        try:
            yield
        finally:
            os.close(handle)

    def cut_off(self) -> CycleFile | None:
        """The cycle that was not brought to its end, if there is one."""
        path = self.folder / CYCLE
        try:
            return CycleFile.model_validate_json(path.read_bytes())
        except (FileNotFoundError, ValidationError):  # of another version of ours
            return None

    def begin(self) -> None:
        """Leave nothing of an earlier cycle."""
        (self.folder / CYCLE).unlink(missing_ok=True)
        for part in (self.mix, self.capture, self.run, self.candidate):
            shutil.rmtree(part, ignore_errors=True)
        self.run.mkdir(mode=0o700)

    def write(self, cycle: CycleFile) -> None:
        with replacing(self.folder / CYCLE) as temporary:
            temporary.write_text(cycle.model_dump_json(indent=2) + "\n", encoding="utf-8")

    def end(self) -> None:
        """Keep the candidate and the run's log, and nothing of what users wrote."""
        (self.folder / CYCLE).unlink(missing_ok=True)
        shutil.rmtree(self.mix, ignore_errors=True)
        for path in self.run.glob(f"{Path(STATES).stem}.*"):
            path.unlink()


# How the serving drafter goes on learning: its own shape and settings, within a budget.

VALIDATIONS = 8  # over a run, and one before it ...
VALIDATION_SHARE = 0.1  # ... but fewer if they would take more of the time than this
RATE_SHARE = 0.5  # of the learning rate that the drafter was trained with


def first_settings(drafter: Path) -> TrainConfig:
    """What the drafter was first trained with, as far as it tells."""
    path = drafter / SETTINGS
    return TrainConfig.resolve({}, path if path.exists() else None)


def require_learnable(checkpoint: Checkpoint) -> None:
    """Training moves what a drafter owns, and reads the target's own embedding and head."""
    config = checkpoint.config
    if not (config.own_head or config.own_embedding):
        return
    what = "head" if config.own_head else "embedding"
    rows = f" ({config.head_rows} rows)" if config.draft_vocab_size else ""
    raise LearnError(
        f"{checkpoint.path}: found a drafter with its own {what}{rows}, wanted one that borrows "
        "the target's; start the registry with the drafter that it was made from, and make the "
        "reduced one from each promoted version with `leadout convert --draft-vocab`"
    )


def settings_for(
    checkpoint: Checkpoint, config: LearnConfig, max_length: int, seed: int
) -> TrainConfig:
    """The settings of a cycle, all but its number of steps."""
    first, shape = first_settings(checkpoint.path), checkpoint.config
    precision = str(checkpoint.tensors.dtype).removeprefix("torch.")
    return first.model_copy(
        update={
            "layers": shape.num_layers,
            "block_size": shape.block_size,
            "target_layer_ids": shape.target_layer_ids,
            "mask_token_id": shape.mask_token_id,
            "initial": str(checkpoint.path),
            "max_length": max_length,
            "learning_rate": config.learning_rate or RATE_SHARE * first.learning_rate,
            "precision": precision if precision == "float32" else "bfloat16",
            "states": "auto",
            "patience": None,
            "compile": False,  # takes minutes, of which there are few
            "seed": seed,
        }
    )


def with_steps(settings: TrainConfig, corpus: Corpus, steps: int, validations: int) -> TrainConfig:
    """The same for so many steps; the learning rate falls to zero over them."""
    epochs = steps * settings.batch_sequences / len(corpus.split.train)
    every = max(1, math.ceil(steps / validations))
    changed = settings.model_copy(update={"epochs": epochs, "validate_every": every})
    assert total_steps(len(corpus.split.train), changed) == steps
    return changed


def steps_for_tokens(tokens: int, settings: TrainConfig, corpus: Corpus) -> int:
    train = corpus.split.train
    answered = sum(
        corpus.lengths[index] - min(len(corpus.samples[index].prompt), settings.max_length)
        for index in train
    )
    return max(1, round(tokens * len(train) / answered / settings.batch_sequences))


def validations_within(seconds: float, timing: Timing, corpus: Corpus) -> int:
    each = len(corpus.split.validation) * timing.seconds_per_validated
    return max(1, min(VALIDATIONS, int(VALIDATION_SHARE * seconds / each) - 1))


def steps_within(seconds: float, timing: Timing, settings: TrainConfig, corpus: Corpus) -> int:
    """As many as fit, with the target's states and the validations that belong to them."""
    validations = 1 + validations_within(seconds, timing, corpus)
    seconds -= validations * len(corpus.split.validation) * timing.seconds_per_validated
    train = corpus.split.train
    of_states = timing.seconds_per_token * sum(corpus.lengths[i] for i in set(train))
    per_pass = timing.seconds_per_step * len(train) / settings.batch_sequences
    if settings.states != "disk":  # steps compute their own, and were timed with them
        passes = seconds / per_pass
    else:  # the first pass computes them
        passes = min(seconds / (per_pass + of_states), 1.0)
        passes += max(0.0, seconds - per_pass - of_states) / per_pass
    return max(1, int(passes * len(train) / settings.batch_sequences))


# Before a cycle trains: what it goes on from, its text, and how many steps its budget allows.


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
    registry = Registry(request.registry)
    pointer = registry.require_pointer()
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
    if ranks.broadcast(goes_on):
        assert before is not None
        return before
    max_length = 0
    if ranks.is_leader:
        work.begin()
        max_length = _write_text(subject, work)
    max_length = _told(ranks, max_length)
    training = settings_for(subject.drafter, subject.request.config, max_length, subject.version)
    training = _within_budget(subject, work, training, ranks, progress)
    cycle = subject.cycle(training)
    if ranks.is_leader:
        work.write(cycle)
    return cycle


def make_run(subject: Subject, work: Work, training: TrainConfig, out: Path, ranks: Ranks) -> Run:
    """A run over the cycle's text in the folder `out`."""
    vocab_size = read_target(subject.target).vocab_size
    share = subject.request.config.replay_share
    corpus = read_training(work.mix, training.max_length, share, vocab_size)
    settings = complete_settings(training, subject.target, corpus, vocab_size)
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
    with tempfile.TemporaryDirectory(dir=work.run if ranks.is_leader else None) as scratch:
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
    steps, validations = (_told(ranks, n if ranks.is_leader else 0) for n in (steps, validations))
    return with_steps(settings, corpus, steps, validations)


def _told(ranks: Ranks, number: int) -> int:
    """The leading rank's number, on every rank; the others give 0."""
    return int(ranks.sum(torch.tensor([number])).item())
