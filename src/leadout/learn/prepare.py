"""What a cycle starts from: its inputs, its text, and its training settings."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from leadout.checkpoints import Checkpoint, read_checkpoint
from leadout.console import Progress
from leadout.data.manifest import DataFolder
from leadout.engine.offline import SESSION_SETTINGS
from leadout.engine.vllm_flags import engine_arguments
from leadout.evaluate.ranks import Ranks
from leadout.files import require_writable, write_text
from leadout.learn.config import (
    DEFAULT_MINUTES,
    CycleSettings,
    LearnConfig,
    LearnError,
    TooLittleTrafficError,
)
from leadout.learn.data import (
    copy_newest,
    download_newest,
    make_mix,
    split_traffic,
    write_mix,
)
from leadout.learn.sources import CapturedText, CycleText
from leadout.learn.work_folder import CYCLE, CycleFile, WorkFolder, remove_folder
from leadout.models import fingerprint, local_folder
from leadout.pairing import read_target, require_trainable
from leadout.registry import Registry, RegistryKey
from leadout.sealed import Keys
from leadout.shards import Samples
from leadout.storage import is_url, resolved
from leadout.train.budget import (
    VALIDATIONS,
    steps_for_seconds,
    steps_for_tokens,
    validations_for_seconds,
    with_steps,
)
from leadout.train.config import TrainConfig
from leadout.train.export import SETTINGS
from leadout.train.init import changed_head_rows
from leadout.train.plan import time_steps
from leadout.train.run import Run, complete_settings

logger = logging.getLogger(__name__)

DECISIONS = ("promoted", "rejected", "undecided")  # one of them ends each cycle in the ledger

RATE_SHARE = 0.5  # of the learning rate that the drafter was first trained with


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
    traffic: str  # a folder or URL; empty if served states are learnt from
    replay: DataFolder
    keys: Keys  # of encrypted traffic
    states_from: tuple[str, ...] = ()  # servers of hidden states
    vllm_flags: tuple[str, ...] = ()  # of every engine that is started

    def cycle(self, training: TrainConfig, segments: dict[str, int], mix_hash: str) -> CycleFile:
        return CycleFile(
            number=self.number,
            parent=self.version,
            parent_fingerprint=self.registry.manifest(self.version).fingerprint,
            target_fingerprint=self.target_fingerprint,
            traffic=resolved(self.traffic) if self.traffic else "",
            replay=str(self.replay.folder.absolute()),
            config=self.settings,
            training=training,
            segments=segments,
            mix_hash=mix_hash,
        )


def open_inputs(config: LearnConfig) -> Inputs:
    """Open the inputs; everything that can be rejected is rejected here, before any work."""
    name: str = config.required("target")
    traffic = "" if config.states else config.required("traffic")
    replay_folder = config.required("replay")
    registry = Registry(config.registry, signing_key(config.registry_key))
    pointer = registry.require_pointer()
    registry.storage.require_writable("--registry")
    require_writable("--work", config.work_folder)
    target = local_folder(name)
    require_trainable(target, name, new=False)
    if config.vllm_flags:
        engine_arguments(name, config.vllm_flags, LearnConfig, SESSION_SETTINGS)
    found = fingerprint(target)
    manifest = registry.verify(pointer.version)
    drafter = read_checkpoint(registry.path(pointer.version))
    replay = DataFolder(replay_folder)
    served_for = manifest.target_fingerprint
    if served_for != found:
        raise LearnError(
            f"--registry {config.registry} has drafters for another target (fingerprint "
            f"{served_for[:12]}) than {target} ({found[:12]}). Create a registry for this one with "
            f"--start {registry.path(pointer.version)}."
        )
    require_learnable(drafter, target)
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
        keys=Keys.read(config.capture_key),
        states_from=config.states_from,
        vllm_flags=config.vllm_flags,
    )


def signing_key(path: Path | None) -> RegistryKey | None:
    """The key of --registry-key, which must be able to sign; read before any work."""
    key = None if path is None else RegistryKey.read(path)
    if key is not None and not key.can_sign:
        raise LearnError(
            f"--registry-key {path} is a public key, expected the private one: new versions are "
            "signed with it. Servers get the public key."
        )
    return key


def require_learnable(checkpoint: Checkpoint, target: Path) -> None:
    """Training changes the drafter's layers, with the target's own embedding and head.

    The head of a reduced draft vocabulary is fine if its rows are copies of the target's.
    """
    config = checkpoint.config
    if not (config.own_head or config.own_embedding):
        return
    if config.own_embedding:
        what = "an embedding of its own"
    elif config.draft_vocab_size is None:
        what = "an output head of its own for the whole vocabulary"
    else:
        changed = changed_head_rows(checkpoint.path, target)
        if changed == 0:
            return
        what = f"an output head in which {changed} of {config.head_rows} rows are not the target's"
    raise LearnError(
        f"{checkpoint.path} has {what}; only drafters that use the target's embedding and head, or "
        "a copy of some of the head's rows, can learn. Start the registry with a drafter of "
        "`leadout train`, or with one that `leadout convert --draft-vocab` has made from it."
    )


def prepare(inputs: Inputs, work: WorkFolder, ranks: Ranks, progress: Progress) -> CycleFile:
    """The settings of this cycle: those of the interrupted one, or new ones, written to a file."""
    before = work.interrupted_cycle()
    resumes = before is not None and before == inputs.cycle(
        before.training, before.segments, before.mix_hash
    )
    if ranks.is_leader and resumes:
        assert before is not None
        resumes = _restore_text(inputs, work, before)
    if ranks.broadcast(resumes):
        assert before is not None
        return before
    max_length, segments = 0, dict[str, int]()
    if ranks.is_leader:
        work.clear()
        max_length, segments = _write_text(inputs, work)
    max_length = _from_leader(ranks, max_length)
    training = base_settings(inputs.drafter, inputs.settings, max_length, inputs.number)
    text = captured_text(inputs, work)
    training = fit_to_budget(inputs, work, text, training, ranks, progress)
    cycle = inputs.cycle(training, segments, work.mix_hash() if ranks.is_leader else "")
    if ranks.is_leader:
        write_cycle(work, cycle)
    return cycle


def write_cycle(work: WorkFolder, cycle: CycleFile) -> None:
    write_text(work.folder / CYCLE, cycle.model_dump_json(indent=2) + "\n")


def captured_text(inputs: Inputs, work: WorkFolder) -> CapturedText:
    """The text that `prepare` has written."""
    return CapturedText(
        mix=work.mix,
        target=inputs.target,
        layer_ids=inputs.drafter.config.target_layer_ids,
        vocab_size=read_target(inputs.target).vocab_size,
        replay_share=inputs.settings.replay_share,
        states_from=inputs.states_from,
        vllm_flags=inputs.vllm_flags,
    )


@contextmanager
def make_run(
    inputs: Inputs, text: CycleText, training: TrainConfig, out: Path, ranks: Ranks
) -> Iterator[Run]:
    """A training run on the text of the cycle, in the folder `out`; its servers end with it."""
    corpus = text.corpus(training.max_length)
    vocab_size = read_target(inputs.target).vocab_size
    settings = complete_settings(training, inputs.target, corpus, vocab_size)
    with text.states(settings, max(corpus.lengths), ranks) as states:
        yield Run(inputs.target, corpus, settings, out, ranks, inputs.drafter.config, states)


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
            "states_from": (),
            "patience": None,
            "first_block_size": None,  # the drafter has learnt whole blocks already
            "compile": False,  # takes minutes, which short cycles do not earn back
            "seed": seed,
        }
    )


def _restore_text(inputs: Inputs, work: WorkFolder, before: CycleFile) -> bool:
    """Select the text of an interrupted cycle again; False if traffic has been deleted since."""
    work.remove_text()
    try:
        _write_text(inputs, work, before.segments)
    except TooLittleTrafficError:
        return False
    return work.mix_hash() == before.mix_hash


def _write_text(
    inputs: Inputs, work: WorkFolder, segments: dict[str, int] | None = None
) -> tuple[int, dict[str, int]]:
    """Write the mix; with `segments`, from so many lines of these files of the captured traffic.

    Returns the length to which sequences are cut, and the lines that were read of each file.
    """
    drafter, settings = inputs.drafter, inputs.settings
    first, vocab_size = first_settings(drafter.path), read_target(inputs.target).vocab_size
    try:
        source = Path(inputs.traffic)
        if is_url(inputs.traffic):
            source = download_newest(inputs.traffic, work.download, segments)
        copied = copy_newest(
            source, inputs.target_fingerprint, vocab_size, work.capture, inputs.keys, segments
        )
        if copied.unusable:
            logger.warning(
                "%d lines of the captured traffic in %s were left out: they are repeated, or are "
                "not samples of this target.",
                copied.unusable,
                inputs.traffic,
            )
        traffic = split_traffic(
            Samples(copied.paths),
            settings,
            block_size=drafter.config.block_size,
            min_length=first.max_length,
            max_length=drafter.config.max_positions,
        )
        mix = make_mix(traffic, inputs.replay, first, settings, inputs.number)
        write_mix(mix, work.mix)
    except BaseException:  # too little traffic, for example
        work.remove_text()
        raise
    remove_folder(work.download)
    remove_folder(work.capture)
    return traffic.max_length, copied.segments


def fit_to_budget(
    inputs: Inputs,
    work: WorkFolder,
    text: CycleText,
    training: TrainConfig,
    ranks: Ranks,
    progress: Progress,
) -> TrainConfig:
    """The settings with as many steps as the minutes or tokens allow."""
    config = inputs.settings
    with (
        # Inside the mix: it has states of the text, and is removed with it.
        tempfile.TemporaryDirectory(dir=work.mix) as scratch,
        make_run(inputs, text, training, Path(scratch), ranks) as run,
    ):
        settings, corpus = run.config, run.corpus
        if config.tokens is not None:
            steps, validations = steps_for_tokens(config.tokens, settings, corpus), VALIDATIONS
        else:
            done = progress.stage("timing a few steps", 1)
            timing = time_steps(run)
            seconds = 60 * (config.minutes or DEFAULT_MINUTES)
            steps = steps_for_seconds(seconds, timing, settings, corpus)
            validations = validations_for_seconds(seconds, timing, corpus)
            done()
        run.release()  # for the run that trains
    return with_steps(settings, corpus, steps, validations)


def _from_leader(ranks: Ranks, number: int) -> int:
    """The leading rank's number, on every rank; the others pass 0."""
    return int(ranks.sum(torch.tensor([number])).item())
