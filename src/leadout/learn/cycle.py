"""One learning cycle: adapt the serving drafter to its traffic, evaluate it, publish or reject it.

Nothing is published before the candidate has passed the gate, and the pointer to the serving
version changes last: an interrupted cycle leaves the servers as they are, and continues when it is
started again.
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from leadout.check.static import static_findings
from leadout.checkpoints import read_checkpoint
from leadout.console import Progress
from leadout.errors import StoppedError
from leadout.evaluate.acceptance import Validation
from leadout.evaluate.ranks import Ranks, joined_ranks
from leadout.files import write_text
from leadout.findings import Severity
from leadout.learn.config import LearnConfig, LearnError
from leadout.learn.data import REPLAY, TRAFFIC
from leadout.learn.gate import (
    Decision,
    Evidence,
    LosslessCheck,
    Trial,
    check_lossless,
    decide,
    evaluate,
)
from leadout.learn.prepare import (
    Inputs,
    captured_text,
    make_run,
    open_inputs,
    prepare,
    require_learnable,
)
from leadout.learn.report import (
    Adaptation,
    CurvePoint,
    LearnResult,
    Started,
    expected_acceptance,
    ledger_evidence,
)
from leadout.learn.sources import CycleText
from leadout.learn.work_folder import WorkFolder
from leadout.models import fingerprint, last_part, local_folder
from leadout.provenance import Provenance, RunStart
from leadout.registry import Event, PointerMovedError, Registry, RegistryKey
from leadout.train.config import TrainConfig
from leadout.train.export import SETTINGS, write_best
from leadout.train.progress import curves_of, progress_listener, read_log
from leadout.train.run import Run
from leadout.train.state import RunStatus

RECORD = "learned.json"


def learn(
    config: LearnConfig, *, show_progress: bool = False, lossless: LosslessCheck | None = None
) -> LearnResult | None:
    """Run one cycle; returns None on all ranks but the leading one."""
    began, started = time.monotonic(), RunStart.now()
    inputs, work = open_inputs(config), WorkFolder(config.work_folder)
    lossless = lossless or partial(
        check_lossless, urls=config.states_from, vllm_flags=config.vllm_flags
    )
    try:
        result = _learn_from_traffic(inputs, work, show_progress, lossless)
    except KeyboardInterrupt:
        raise StoppedError(
            "Stopped. Run the same command again to continue from the last saved step."
        ) from None
    return None if result is None else with_provenance(result, inputs, began, started)


def with_provenance(
    result: LearnResult, inputs: Inputs, began: float, started: RunStart
) -> LearnResult:
    """The result of a cycle that began at this time of the monotonic clock."""
    served = inputs.registry.manifest(inputs.version).fingerprint
    models = {"target": inputs.target_fingerprint, "drafter": served}
    return result.model_copy(
        update={
            "seconds": time.monotonic() - began,
            "provenance": Provenance.of_this_run(models, started),
        }
    )


def _learn_from_traffic(
    inputs: Inputs, work: WorkFolder, show_progress: bool, lossless: LosslessCheck
) -> LearnResult | None:
    with ExitStack() as held:
        with joined_ranks() as ranks:
            is_shown = show_progress and ranks.is_leader
            progress = held.enter_context(Progress("learn", quiet=not is_shown))
            if ranks.is_leader:
                held.enter_context(work.locked())
                finish_promoted(inputs, work)
            training = prepare(inputs, work, ranks, progress).training
            text = captured_text(inputs, work)
            trained = train(inputs, work, text, training, ranks, progress)
            if not ranks.is_leader:
                return None
        return conclude(inputs, work, text, trained, lossless, progress)


class Trained(NamedTuple):
    """A run that has ended; only its settings, data and files can still be used."""

    run: Run
    status: RunStatus
    before: Validation  # with the weights of the serving version


def train(
    inputs: Inputs,
    work: WorkFolder,
    text: CycleText,
    training: TrainConfig,
    ranks: Ranks,
    progress: Progress,
) -> Trained:
    """Train on the text of a cycle."""
    with make_run(inputs, text, training, work.folder, ranks) as run:
        run.require_room()
        before = run.validate()
        status = run.train(progress_listener(progress, run))
        run.release()  # for the engine
    return Trained(run, status, before)


def conclude(
    inputs: Inputs,
    work: WorkFolder,
    text: CycleText,
    trained: Trained,
    lossless: LosslessCheck | str,
    progress: Progress,
) -> LearnResult:
    """Evaluate the candidate, publish or reject it, and record that; ends the cycle.

    In place of `lossless` there may be the reason why that check is left out.
    """
    run = trained.run
    adaptation = _write_candidate(inputs, work, trained)
    trial = Trial(
        target=inputs.target,
        first=inputs.first,
        serving=inputs.drafter.path,
        candidate=work.candidate,
        held_out=text.held_out(),
        base=text.base(),
        max_length=run.config.max_length,
        device=run.ranks.device,
        states_from=inputs.states_from,
        vllm_flags=inputs.vllm_flags,
        states=text.known_states,
    )
    evidence = evaluate(trial, lossless, progress)
    decision, version = decide(evidence, inputs.settings), None
    if decision.passed:
        decision, version = _promote(inputs, work.candidate, decision, evidence, adaptation)
    else:
        reasons = "; ".join(decision.reasons)
        numbers = ledger_evidence(evidence, adaptation)
        event: Event = "undecided" if decision.verdict == "undecided" else "rejected"
        inputs.registry.record(event, None, reasons, numbers)
    work.finish()
    return LearnResult(
        promoted=decision.passed,
        version=version,
        parent=inputs.version,
        decision=decision,
        evidence=evidence,
        adaptation=adaptation,
        seconds=0.0,
    )


def _promote(
    inputs: Inputs, candidate: Path, decision: Decision, evidence: Evidence, adaptation: Adaptation
) -> tuple[Decision, int]:
    """Publish a candidate that has passed, and serve it unless the serving version has changed.

    Returns the final decision and the version of the candidate.
    """
    registry, parent = inputs.registry, inputs.version
    why = "; ".join(decision.reasons)
    numbers = ledger_evidence(evidence, adaptation)
    # An interrupted cycle may have published it already.
    found, known = fingerprint(candidate), registry.readable_manifests()
    manifest = next((m for m in known if (m.fingerprint, m.parent) == (found, parent)), None)
    if manifest is None:
        manifest = registry.publish(
            candidate,
            target_fingerprint=inputs.target_fingerprint,
            parent=parent,
            expected=expected_acceptance(evidence),
        )
    registry.record("published", manifest.version, why, once=True)
    mark = registry.bad_mark(manifest.version)
    try:
        if mark is None:
            registry.point_to(manifest.version, why, only_from=parent)
            registry.record("promoted", manifest.version, why, numbers, once=True)
            return decision, manifest.version
        # It was promoted before the cycle was interrupted, and servers have rolled it back since.
        reason = f"serving: version {manifest.version} was rolled back: {mark.reason}"
    except PointerMovedError as problem:
        # A roll-back or another cycle: the candidate was compared with a version that is no longer
        # served.
        reason = f"serving: {problem}. Run `leadout learn` again to compare with it"
    registry.record("rejected", manifest.version, reason, numbers)
    return Decision(verdict="rejected", reasons=[reason]), manifest.version


def finish_promoted(inputs: Inputs, work: WorkFolder) -> None:
    """End an interrupted cycle whose candidate is already the serving version."""
    before, served = work.interrupted_cycle(), inputs.registry.manifest(inputs.version)
    if before is None or served.parent != before.parent or not work.candidate.is_dir():
        return
    if fingerprint(work.candidate) == served.fingerprint:
        registry, parent = inputs.registry, {"parent": before.parent}
        why = registry.require_pointer().reason
        registry.record("published", served.version, why, once=True)
        registry.record("promoted", served.version, why, parent, once=True)
        work.finish()


def _write_candidate(inputs: Inputs, work: WorkFolder, trained: Trained) -> Adaptation:
    """Write the best weights in the parent's format, with a record of how they were made."""
    run, status, before = trained
    parent = inputs.drafter
    write_best(
        run,
        work.candidate,
        parent.format,
        parent.target_name or last_part(inputs.target_name),
        parent.draft_tokens,
    )
    # The settings of the first training say which of the original data was held out.
    if (parent.path / SETTINGS).exists():
        shutil.copyfile(parent.path / SETTINGS, work.candidate / SETTINGS)
    corpus = run.corpus
    parts = [corpus.samples.part_of(index) for index in set(corpus.split.train)]
    adaptation = Adaptation(
        parent=inputs.version,
        steps=status.step,
        best_step=status.best_step,
        minutes=status.seconds / 60,
        traffic_requests=parts.count(TRAFFIC),
        replay_sequences=parts.count(REPLAY),
        config=inputs.settings,
        # The record is copied between machines, so it names the version and not its path.
        training=run.config.model_copy(update={"initial": f"version {inputs.version}"}),
        curve=[
            _point(0, 0.0, before),
            *(
                _point(record.step, record.seconds, record.validation)
                for record in curves_of(read_log(run.folder)).validations
            ),
        ],
    )
    write_text(work.candidate / RECORD, adaptation.model_dump_json(indent=2) + "\n")
    return adaptation


def _point(step: int, seconds: float, validation: Validation) -> CurvePoint:
    lengths = {name: found.acceptance_length for name, found in validation.by_source.items()}
    return CurvePoint(step=step, minutes=seconds / 60, by_source=lengths)


def start_registry(
    target: str, place: str | Path, drafter: str, key: RegistryKey | None = None
) -> Started:
    """Create a registry that serves a drafter as its version 1."""
    registry = Registry(place, key)
    registry.storage.require_writable("--registry")
    pointer = registry.pointer()
    if pointer is not None:
        raise LearnError(
            f"--start {drafter}: {place} already is a registry, which serves version "
            f"{pointer.version}. Omit --start, or choose a new folder."
        )
    target_folder, source = local_folder(target), local_folder(drafter)
    unfit = [
        finding
        for finding in static_findings(target_folder, source, target_name=target)
        if finding.severity is Severity.ERROR
    ]
    if unfit:
        reasons = "\n".join(f"{finding.name}: {finding.message}" for finding in unfit)
        raise LearnError(f"--start {drafter}: the drafter does not fit the target.\n{reasons}")
    require_learnable(read_checkpoint(source), target_folder)
    manifest = registry.publish(source, target_fingerprint=fingerprint(target_folder))
    why = f"first version: {source.name}"
    registry.record("published", manifest.version, why)
    registry.point_to(manifest.version, why)
    registry.record("promoted", manifest.version, why)
    return Started(version=manifest.version, drafter=drafter, fingerprint=manifest.fingerprint)
