"""Learning from hidden states as they are served: one cycle after the other, until stopped.

A cycle is the one of `cycle.py`. What differs is where its text comes from: served sequences arrive
with their states, which a `Collector` keeps in memory. Nothing of them is written to a file, and
the target is never loaded: labels are the tokens that it chose. The newest sequences stay in
memory, so later cycles train on old and new ones, from the version that is served then. A learner
that is killed loses what it had in memory, and starts with what is served next. So an error that
can pass, such as a registry that cannot be reached, does not end it: the cycle is tried again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch

from leadout.console import Progress
from leadout.engine.child_process import forbid_core_dumps
from leadout.errors import LeadoutError
from leadout.evaluate.memory_states import StatesInMemory
from leadout.evaluate.ranks import Ranks, joined_ranks
from leadout.learn.base_states import BaseRequest, BaseStates
from leadout.learn.collector import Collector, KeptSequence, ServedCounts, open_sources
from leadout.learn.config import LearnConfig, LearnError, TooLittleTrafficError
from leadout.learn.cycle import conclude, finish_promoted, train, with_provenance
from leadout.learn.data import MAX_LENGTH, TRAFFIC, make_mix, select_base, split_traffic
from leadout.learn.prepare import (
    Inputs,
    base_settings,
    first_settings,
    fit_to_budget,
    open_inputs,
    write_cycle,
)
from leadout.learn.report import LearnResult
from leadout.learn.sources import LOSSLESS_LEFT_OUT, ServedText
from leadout.learn.work_folder import WorkFolder
from leadout.pairing import read_target
from leadout.provenance import RunStart
from leadout.registry import RegistryKeyError
from leadout.settings import SettingsError
from leadout.shards import SamplesInMemory
from leadout.train.config import TrainConfig, TrainError

logger = logging.getLogger(__name__)

LOWEST_PRIORITY = 19
WAIT_SECONDS = 0.5
MANY_SEQUENCES = 50  # after so many, a warning that most cannot be used is no accident
GIB = 1 << 30
# After a cycle that failed; each further failure doubles the pause.
FIRST_PAUSE, MAX_PAUSE = 5.0, 600.0  # seconds
# Errors that can pass: a registry that is locked or cannot be reached, a full disk, a device whose
# memory somebody else uses. Anything else is a bug.
PASSING_ERRORS = (LeadoutError, OSError, torch.OutOfMemoryError)
# Those of them that name a setting, or what it refers to, stay until somebody changes it.
SETTINGS_ERRORS = (LearnError, TrainError, SettingsError, RegistryKeyError)


def protect_process(*, nice: bool) -> None:
    """Keep what users wrote out of core dumps, and let a server on this machine go first."""
    forbid_core_dumps()
    if nice:
        os.nice(LOWEST_PRIORITY)


def learn_from_states(
    config: LearnConfig,
    report: Callable[[LearnResult], None] = lambda _: None,
    *,
    show_progress: bool = False,
) -> LearnResult | None:
    """Run cycles, `config.cycles` of them or until interrupted; `report` gets each result.

    A cycle that fails for a reason that can pass is tried again with what is in memory by then.
    Returns the last result, or None without a cycle.
    """
    inputs, work = open_inputs(config), WorkFolder(config.work_folder)
    with ExitStack() as held:
        ranks = held.enter_context(joined_ranks())
        if ranks.count > 1:
            raise LearnError(
                f"--states requires a single process, but torchrun started {ranks.count}: served "
                "sequences are in the memory of one. Start `leadout learn` without torchrun."
            )
        held.enter_context(work.locked())
        finish_promoted(inputs, work)
        drafter = inputs.drafter.config
        found = inputs.target_fingerprint
        sources = open_sources(config.states, config.states_key, found, drafter)
        vocab_size = read_target(inputs.target).vocab_size
        collector = Collector(sources, drafter, vocab_size, int(config.keep_gib * GIB))
        held.enter_context(collector)
        base = BaseStates(_base_request(config, inputs, work), found)
        held.callback(base.close)
        with Progress("learn", quiet=not show_progress) as progress:
            base.compute(progress)
        learner = _Learner(config, work, ranks, collector, base, show_progress)
        result, done, pause = None, 0, FIRST_PAUSE
        while config.cycles is None or done < config.cycles:
            tried = learner.try_cycle(pause)
            if tried is None:
                time.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)
                continue
            result, done, pause = tried, done + 1, FIRST_PAUSE
            report(result)
        return result


class _Selected(NamedTuple):
    """The text of a cycle, and the version and settings that it is for."""

    inputs: Inputs
    text: ServedText
    max_length: int
    used: int  # sequences that had arrived by then


@dataclass
class _Learner:
    """What all cycles share."""

    config: LearnConfig
    work: WorkFolder
    ranks: Ranks
    collector: Collector
    base: BaseStates
    show_progress: bool
    used: int = 0  # sequences that had arrived when the last complete cycle began
    has_failed: bool = False

    def try_cycle(self, pause: float) -> LearnResult | None:
        """One cycle; None if it failed and is to be tried again after so many seconds."""
        try:
            with Progress("learn", quiet=not self.show_progress) as progress:
                if self.has_failed:  # perhaps after its candidate was promoted
                    finish_promoted(open_inputs(self.config), self.work)
                selected = _wait_for_text(
                    self.config, self.collector, self.base, self.used, progress
                )
                began, started = time.monotonic(), RunStart.now()
                result = _run_cycle(selected, self.work, self.ranks, progress)
        except PASSING_ERRORS as problem:
            if isinstance(problem, SETTINGS_ERRORS) or problem is self.collector.problem:
                raise
            logger.warning(
                "A cycle failed: %s. What was served is still in memory; trying again in %g "
                "seconds.",
                str(problem).strip().rstrip(".") or type(problem).__name__,
                pause,
            )
            self.has_failed = True
            return None
        self.used, self.has_failed = selected.used, False
        result = result.model_copy(update={"served": self.collector.counts()})
        return with_provenance(result, selected.inputs, began, started)


def _run_cycle(
    selected: _Selected, work: WorkFolder, ranks: Ranks, progress: Progress
) -> LearnResult:
    inputs, text = selected.inputs, selected.text
    work.clear()
    work.mix.mkdir(mode=0o700)  # stays empty: the text is in memory
    training = settings_of(inputs, selected.max_length)
    training = fit_to_budget(inputs, work, text, training, ranks, progress)
    # Nothing continues from this file; it tells the next start whose decision may lack an entry.
    write_cycle(work, inputs.cycle(training, segments={}, mix_hash=""))
    trained = train(inputs, work, text, training, ranks, progress)
    return conclude(inputs, work, text, trained, LOSSLESS_LEFT_OUT, progress)


def settings_of(inputs: Inputs, max_length: int) -> TrainConfig:
    """The training settings of a cycle on served states, except for the number of steps.

    Servers hand out no final states, so there is nothing to distil from. States are not written to
    disk by the run: those of replayed data are there already, the others must not be.
    """
    training = base_settings(inputs.drafter, inputs.settings, max_length, inputs.number)
    return training.model_copy(update={"states": "compute", "distillation": 0.0})


def _base_request(config: LearnConfig, inputs: Inputs, work: WorkFolder) -> BaseRequest:
    first, drafter = first_settings(inputs.drafter.path), inputs.drafter.config
    indices = select_base(inputs.replay, first, inputs.settings, config.replay_states)
    longest = min(max(first.max_length, MAX_LENGTH), drafter.max_positions)  # of any cycle
    return BaseRequest(
        target=str(inputs.target),
        layer_ids=drafter.target_layer_ids,
        hidden_size=drafter.context_size,
        precision=settings_of(inputs, longest).precision,
        data=str(inputs.replay.folder),
        indices=tuple(indices),
        max_length=longest,
        folder=str(work.base),
        states_from=inputs.states_from,
        vllm_flags=inputs.vllm_flags,
    )


def _wait_for_text(
    config: LearnConfig,
    collector: Collector,
    base: BaseStates,
    used_before: int,
    progress: Progress,
) -> _Selected:
    """Wait until there are enough requests, and enough new ones for a held-out part of their own.

    `used_before` sequences were there when the cycle before began.
    """
    needed = config.min_requests * (1 if used_before else 2)
    waiting = progress.stage("waiting for requests")
    warnings = _Warnings(progress)
    looked_at = 0
    while True:
        kept, counts = collector.newest(), collector.counts()
        if counts.used - used_before >= needed and counts.used > looked_at:
            looked_at = counts.used
            try:
                # Opened again: another version may be served by now.
                return _select(open_inputs(config), kept, base, counts.used)
            except TooLittleTrafficError:  # the same prompts again, or not enough memory
                warnings.too_few_kept(len(kept), counts)
        warnings.without_beginning(counts)
        waiting(0, f"{counts.used - used_before} of {needed}")
        time.sleep(WAIT_SECONDS)


class _Warnings:
    """What can keep a learner waiting for ever; each is said once."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._said: set[str] = set()

    def too_few_kept(self, kept: int, counts: ServedCounts) -> None:
        if kept < counts.used:
            self._say(
                "keep",
                f"only {kept} of {counts.used} sequences fit into memory, too few for a cycle. "
                "Raise --keep-gib, or lower --min-requests.",
            )

    def without_beginning(self, counts: ServedCounts) -> None:
        if counts.sequences >= MANY_SEQUENCES and 2 * counts.without_beginning > counts.sequences:
            self._say(
                "beginning",
                f"{counts.without_beginning} of {counts.sequences} served sequences are left out: "
                "their beginning came from the server's prefix cache, and the drafter sees it. "
                "Serve with --no-enable-prefix-caching, or train a drafter with --window.",
            )

    def _say(self, name: str, text: str) -> None:
        if name not in self._said:
            self._said.add(name)
            self._progress.say(f"warning: {text}")


def _select(inputs: Inputs, kept: list[KeptSequence], base: BaseStates, used: int) -> _Selected:
    """The text of a cycle from the sequences in memory and the replayed data."""
    drafter, settings = inputs.drafter.config, inputs.settings
    first = first_settings(inputs.drafter.path)
    traffic = split_traffic(
        SamplesInMemory({TRAFFIC: [each.sample for each in kept]}),
        settings,
        block_size=drafter.block_size,
        min_length=first.max_length,
        max_length=drafter.max_positions,
    )
    mix = make_mix(traffic, inputs.replay, first, settings, inputs.number, set(base.indices))
    precision = settings_of(inputs, traffic.max_length).precision
    states = StatesInMemory(
        {each.sample.id: each.states for each in kept},
        base,
        hidden_size=drafter.context_size,
        dtype=getattr(torch, precision),
    )
    vocab_size = read_target(inputs.target).vocab_size
    text = ServedText(mix, states, vocab_size, settings.replay_share)
    return _Selected(inputs, text, traffic.max_length, used)
