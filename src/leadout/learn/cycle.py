"""One learning cycle: adapt the serving drafter to its traffic, evaluate it, publish or reject it.

Nothing is published before the candidate has passed the gate, and the pointer to the serving
version changes last: an interrupted cycle leaves the servers as they are, and continues when it is
started again.
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack

from leadout.console import Progress
from leadout.errors import StoppedError
from leadout.evaluate.acceptance import Validation
from leadout.evaluate.ranks import joined_ranks
from leadout.files import write_text
from leadout.learn import data as mix
from leadout.learn.config import LearnConfig
from leadout.learn.gate import LosslessCheck, Margins, Trial, check_lossless, decide, evaluate
from leadout.learn.prepare import Inputs, WorkFolder, make_run, open_inputs, prepare
from leadout.learn.promote import promote, reject
from leadout.learn.report import Adaptation, CurvePoint, LearnResult
from leadout.models import last_part
from leadout.train.export import SETTINGS, write_best
from leadout.train.progress import curves_of, progress_listener, read_log
from leadout.train.run import Run
from leadout.train.state import RunStatus

RECORD = "learned.json"


def learn(
    config: LearnConfig, *, show_progress: bool = False, lossless: LosslessCheck = check_lossless
) -> LearnResult | None:
    """Run one cycle; returns None on all ranks but the leading one."""
    began = time.monotonic()
    inputs, work = open_inputs(config), WorkFolder(config.work_folder)
    try:
        result = _run_cycle(inputs, work, show_progress, lossless)
    except KeyboardInterrupt:
        raise StoppedError(
            "Stopped. Run the same command again to continue from the last saved step."
        ) from None
    return result and result.model_copy(update={"seconds": time.monotonic() - began})


def _run_cycle(
    inputs: Inputs, work: WorkFolder, show_progress: bool, lossless: LosslessCheck
) -> LearnResult | None:
    with ExitStack() as held:
        with joined_ranks() as ranks:
            is_shown = show_progress and ranks.is_leader
            progress = held.enter_context(Progress("learn", quiet=not is_shown))
            if ranks.is_leader:
                held.enter_context(work.locked())
            cycle = prepare(inputs, work, ranks, progress)
            run = make_run(inputs, work, cycle.training, work.folder, ranks)
            before_training = run.validate()
            status = run.train(progress_listener(progress, run))
            if not ranks.is_leader:
                return None
        adaptation = _write_candidate(inputs, work, run, status, before_training)
        del run  # frees memory for the engine
        trial = Trial(
            target=inputs.target,
            serving=inputs.drafter.path,
            candidate=work.candidate,
            held_out=mix.read_part(work.mix, mix.HELD_OUT),
            base=mix.read_part(work.mix, mix.BASE),
            max_length=cycle.training.max_length,
            device=ranks.device,
        )
        result = _decide(inputs, trial, adaptation, lossless, progress)
        work.finish()
    return result


def _decide(
    inputs: Inputs,
    trial: Trial,
    adaptation: Adaptation,
    lossless: LosslessCheck,
    progress: Progress,
) -> LearnResult:
    settings = inputs.settings
    evidence = evaluate(trial, lossless, progress)
    decision = decide(evidence, Margins(gain=settings.gain, base_loss=settings.base_loss))
    version = None
    if decision.passed:
        decision, version = promote(
            inputs.registry,
            trial.candidate,
            inputs.target_fingerprint,
            decision,
            evidence,
            adaptation,
        )
    else:
        reject(inputs.registry, decision, evidence, adaptation)
    return LearnResult(
        promoted=decision.passed,
        version=version,
        parent=inputs.version,
        decision=decision,
        evidence=evidence,
        adaptation=adaptation,
        seconds=0.0,
    )


def _write_candidate(
    inputs: Inputs, work: WorkFolder, run: Run, status: RunStatus, before: Validation
) -> Adaptation:
    """Write the best weights in the parent's format, with a record of how they were made."""
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
    adaptation = _adaptation(inputs, run, status, before)
    write_text(work.candidate / RECORD, adaptation.model_dump_json(indent=2) + "\n")
    return adaptation


def _adaptation(inputs: Inputs, run: Run, status: RunStatus, before: Validation) -> Adaptation:
    corpus = run.corpus
    trained = [corpus.samples.path_of(index).name for index in set(corpus.split.train)]
    return Adaptation(
        parent=inputs.version,
        steps=status.step,
        best_step=status.best_step,
        minutes=status.seconds / 60,
        traffic_requests=trained.count(mix.TRAFFIC),
        replay_sequences=trained.count(mix.REPLAY),
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


def _point(step: int, seconds: float, validation: Validation) -> CurvePoint:
    lengths = {name: found.acceptance_length for name, found in validation.by_source.items()}
    return CurvePoint(step=step, minutes=seconds / 60, by_source=lengths)
