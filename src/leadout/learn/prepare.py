"""What a cycle starts from: its inputs, its work folder, its text, and its training settings.

The work folder:

    work/
      lock
      cycle.json     the settings of the cycle; written once the text is complete
      mix/           the text to train and evaluate on; removed when the cycle ends
      run/           the training run
      candidate/     the drafter that the gate evaluates

An interrupted cycle continues from it. Everything in it can contain what users wrote, so it is
readable by the owner only.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from leadout.checkpoints import Checkpoint, read_checkpoint
from leadout.console import Progress
from leadout.data.manifest import DataFolder
from leadout.evaluate.ranks import Ranks
from leadout.files import Timeout, lock, require_writable, write_text
from leadout.learn.config import DEFAULT_MINUTES, CycleSettings, LearnConfig, LearnError, Record
from leadout.learn.data import copy_newest, make_mix, read_training, split_traffic, write_mix
from leadout.models import fingerprint, local_folder
from leadout.pairing import read_target
from leadout.registry import Registry
from leadout.train.config import TrainConfig
from leadout.train.export import SETTINGS
from leadout.train.loop import total_steps
from leadout.train.plan import Timing, time_steps
from leadout.train.run import STATES, WORK, Corpus, Run, complete_settings

DECISIONS = ("promoted", "rejected", "undecided")  # one of them ends each cycle in the ledger
CYCLE = "cycle.json"
LOCK = "lock"

VALIDATIONS = 8  # during a run, and one before it ...
VALIDATION_SHARE = 0.1  # ... but fewer if they took more than this share of the time
RATE_SHARE = 0.5  # of the learning rate that the drafter was first trained with


class CycleFile(Record):
    """Everything a cycle depends on; an interrupted cycle continues only if it is unchanged."""

    number: int
    parent: int
    parent_fingerprint: str
    target_fingerprint: str
    traffic: str
    replay: str
    config: CycleSettings
    training: TrainConfig  # derived from the rest and from measured speed


class WorkFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mix = folder / "mix"
        self.capture = folder / "capture"
        self.run = folder / WORK
        self.candidate = folder / "candidate"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclusive use of the folder; the lock is released when the process ends."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            held = lock(self.folder / LOCK, seconds=0).acquire()
        except Timeout:
            raise LearnError(
                f"--work {self.folder} is in use by another cycle. Wait until it ends, or choose "
                "another folder."
            ) from None
        with held:
            yield

    def interrupted_cycle(self) -> CycleFile | None:
        """The cycle that has not been finished, if there is one."""
        try:
            return CycleFile.model_validate_json((self.folder / CYCLE).read_bytes())
        except (FileNotFoundError, ValidationError):  # none, or of another version of Leadout
            return None

    def clear(self) -> None:
        """Remove everything of an earlier cycle."""
        (self.folder / CYCLE).unlink(missing_ok=True)
        for part in (self.mix, self.capture, self.run, self.candidate):
            shutil.rmtree(part, ignore_errors=True)
        self.run.mkdir(mode=0o700)

    def finish(self) -> None:
        """Keep the candidate and the log of the run, and nothing that users wrote."""
        (self.folder / CYCLE).unlink(missing_ok=True)
        shutil.rmtree(self.mix, ignore_errors=True)
        for path in self.run.glob(f"{Path(STATES).stem}.*"):
            path.unlink()


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a cycle starts from, opened and checked."""

    settings: CycleSettings
    target_name: str
    target: Path
    target_fingerprint: str
    registry: Registry
    number: int  # of the cycle; each has its own replay and base sequences
    version: int  # the serving one, which training starts from
    drafter: Checkpoint
    first: Path  # version 1, with which every candidate is compared
    traffic: Path
    replay: DataFolder

    def cycle(self, training: TrainConfig) -> CycleFile:
        return CycleFile(
            number=self.number,
            parent=self.version,
            parent_fingerprint=self.registry.manifest(self.version).fingerprint,
            target_fingerprint=self.target_fingerprint,
            traffic=str(self.traffic.absolute()),
            replay=str(self.replay.folder.absolute()),
            config=self.settings,
            training=training,
        )


def open_inputs(config: LearnConfig) -> Inputs:
    """Open the inputs; everything that can be rejected is rejected here, before any work."""
    name: str = config.required("target")
    traffic, replay_folder = config.required("traffic"), config.required("replay")
    registry = Registry(config.registry)
    pointer = registry.require_pointer()
    require_writable("--registry", config.registry)
    require_writable("--work", config.work_folder)
    target = local_folder(name)
    found = fingerprint(target)
    drafter = read_checkpoint(registry.path(pointer.version))
    require_learnable(drafter)
    replay = DataFolder(replay_folder)
    served_for = registry.manifest(pointer.version).target_fingerprint
    if served_for != found:
        raise LearnError(
            f"--registry {config.registry} has drafters for another target (fingerprint "
            f"{served_for[:12]}) than {target} ({found[:12]}). Create a registry for this one with "
            f"--start {registry.path(pointer.version)}."
        )
    if replay.job.target_fingerprint != found:
        raise LearnError(
            f"--replay {replay.folder} has answers of {replay.job.target} (fingerprint "
            f"{replay.job.target_fingerprint[:12]}), not of {target} ({found[:12]}). A drafter "
            "learns only from its own target's text: run `leadout data` with this target."
        )
    return Inputs(
        settings=config.cycle,
        target_name=name,
        target=target,
        target_fingerprint=found,
        registry=registry,
        number=sum(entry.event in DECISIONS for entry in registry.ledger()),
        version=pointer.version,
        drafter=drafter,
        first=registry.first(),
        traffic=traffic,
        replay=replay,
    )


def require_learnable(checkpoint: Checkpoint) -> None:
    """Training changes the drafter's layers, with the target's own embedding and head."""
    config = checkpoint.config
    if not (config.own_head or config.own_embedding):
        return
    what = "head" if config.own_head else "embedding"
    rows = f" ({config.head_rows} rows)" if config.draft_vocab_size else ""
    raise LearnError(
        f"{checkpoint.path} has its own {what}{rows}; only drafters that use the target's can "
        "learn. Start the registry with the drafter that it was made from, and make the reduced "
        "one from each promoted version with `leadout convert --draft-vocab`."
    )


def prepare(inputs: Inputs, work: WorkFolder, ranks: Ranks, progress: Progress) -> CycleFile:
    """The settings of this cycle: those of the interrupted one, or new ones, written to a file."""
    before = work.interrupted_cycle()
    resumes = before is not None and before == inputs.cycle(before.training)
    if ranks.broadcast(resumes):
        assert before is not None
        return before
    max_length = 0
    if ranks.is_leader:
        work.clear()
        max_length = _write_text(inputs, work)
    max_length = _from_leader(ranks, max_length)
    training = base_settings(inputs.drafter, inputs.settings, max_length, inputs.number)
    training = _fit_to_budget(inputs, work, training, ranks, progress)
    cycle = inputs.cycle(training)
    if ranks.is_leader:
        write_text(work.folder / CYCLE, cycle.model_dump_json(indent=2) + "\n")
    return cycle


def make_run(
    inputs: Inputs, work: WorkFolder, training: TrainConfig, out: Path, ranks: Ranks
) -> Run:
    """A training run on the text of the cycle, in the folder `out`."""
    vocab_size = read_target(inputs.target).vocab_size
    share = inputs.settings.replay_share
    corpus = read_training(work.mix, training.max_length, share, vocab_size)
    settings = complete_settings(training, inputs.target, corpus, vocab_size)
    return Run(inputs.target, corpus, settings, out, ranks, inputs.drafter.config)


def first_settings(drafter: Path) -> TrainConfig:
    """The settings of the drafter's first training, or the defaults if it does not record them."""
    path = drafter / SETTINGS
    return TrainConfig.resolve({}, path if path.exists() else None)


def base_settings(
    checkpoint: Checkpoint, settings: CycleSettings, max_length: int, seed: int
) -> TrainConfig:
    """The training settings of a cycle, except for the number of steps."""
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
            "learning_rate": settings.learning_rate or RATE_SHARE * first.learning_rate,
            "precision": precision if precision == "float32" else "bfloat16",
            "states": "auto",
            "patience": None,
            "compile": False,  # takes minutes, which short cycles do not earn back
            "seed": seed,
        }
    )


def with_steps(settings: TrainConfig, corpus: Corpus, steps: int, validations: int) -> TrainConfig:
    """Settings for exactly `steps` steps, over which the learning rate decays to zero."""
    epochs = steps * settings.batch_sequences / len(corpus.split.train)
    every = max(1, math.ceil(steps / validations))
    changed = settings.model_copy(update={"epochs": epochs, "validate_every": every})
    assert total_steps(len(corpus.split.train), changed) == steps
    return changed


def steps_for_tokens(tokens: int, settings: TrainConfig, corpus: Corpus) -> int:
    """The number of steps that train on `tokens` answer tokens."""
    train = corpus.split.train
    answer_tokens = sum(
        corpus.lengths[index] - min(len(corpus.samples[index].prompt), settings.max_length)
        for index in train
    )
    return max(1, round(tokens * len(train) / answer_tokens / settings.batch_sequences))


def steps_for_seconds(seconds: float, timing: Timing, settings: TrainConfig, corpus: Corpus) -> int:
    """The number of steps that fit, with their hidden states and validations."""
    validations = 1 + validations_for_seconds(seconds, timing, corpus)
    seconds -= validations * len(corpus.split.validation) * timing.seconds_per_validated
    train = corpus.split.train
    states = timing.seconds_per_token * sum(corpus.lengths[i] for i in set(train))
    per_pass = timing.seconds_per_step * len(train) / settings.batch_sequences
    if settings.states != "disk":  # each step computes its states, and was timed with them
        passes = seconds / per_pass
    else:  # the first pass computes them
        passes = min(seconds / (per_pass + states), 1.0)
        passes += max(0.0, seconds - per_pass - states) / per_pass
    return max(1, int(passes * len(train) / settings.batch_sequences))


def validations_for_seconds(seconds: float, timing: Timing, corpus: Corpus) -> int:
    each = len(corpus.split.validation) * timing.seconds_per_validated
    return max(1, min(VALIDATIONS, int(VALIDATION_SHARE * seconds / each) - 1))


def _write_text(inputs: Inputs, work: WorkFolder) -> int:
    """Write the mix; returns the length to which sequences are cut."""
    drafter, settings = inputs.drafter, inputs.settings
    first = first_settings(drafter.path)
    traffic = split_traffic(
        copy_newest(inputs.traffic, inputs.target_fingerprint, work.capture),
        settings,
        block_size=drafter.config.block_size,
        min_length=first.max_length,
        max_length=drafter.config.max_positions,
    )
    mix = make_mix(traffic, inputs.replay, first, settings, inputs.number)
    write_mix(mix, work.mix)
    shutil.rmtree(work.capture)
    return traffic.max_length


def _fit_to_budget(
    inputs: Inputs, work: WorkFolder, training: TrainConfig, ranks: Ranks, progress: Progress
) -> TrainConfig:
    """The settings with as many steps as the minutes or tokens allow."""
    config = inputs.settings
    with tempfile.TemporaryDirectory(dir=work.run if ranks.is_leader else None) as scratch:
        run = make_run(inputs, work, training, Path(scratch), ranks)
        settings, corpus = run.config, run.corpus
        if config.tokens is not None:
            steps, validations = steps_for_tokens(config.tokens, settings, corpus), VALIDATIONS
        else:
            done = progress.stage("timing a few steps", 1)
            timing = time_steps(run)  # on all ranks at the same time, as in training
            seconds = 60 * (config.minutes or DEFAULT_MINUTES)
            steps = steps_for_seconds(seconds, timing, settings, corpus)
            validations = validations_for_seconds(seconds, timing, corpus)
            done()
    steps, validations = (
        _from_leader(ranks, number if ranks.is_leader else 0) for number in (steps, validations)
    )
    return with_steps(settings, corpus, steps, validations)


def _from_leader(ranks: Ranks, number: int) -> int:
    """The leading rank's number, on every rank; the others pass 0."""
    return int(ranks.sum(torch.tensor([number])).item())
