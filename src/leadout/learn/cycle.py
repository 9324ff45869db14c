"""One cycle of learning: adapt the serving drafter to its traffic, judge, publish or reject.

Nothing is published before the gate has passed it, and the pointer moves last: a cycle that is
killed leaves the servers as they are, and goes on where it was when it is started again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from leadout.console import Progress
from leadout.evaluate.acceptance import Validation
from leadout.evaluate.ranks import joined_ranks
from leadout.files import replacing
from leadout.learn import data as mix
from leadout.learn.config import LearnRequest
from leadout.learn.gate import Margins, Prove, Trial, decide, gather, prove_lossless
from leadout.learn.prepare import Subject, Work, make_run, prepare, subject_of
from leadout.learn.promote import promote, reject
from leadout.learn.report import Adaptation, CurvePoint, LearnResult
from leadout.models import last_part
from leadout.train.export import SETTINGS, write_best
from leadout.train.progress import curves_of, progress_listener, read_log
from leadout.train.run import Run
from leadout.train.run_state import RunStatus

RECORD = "learned.json"


Bars = Callable[[], AbstractContextManager[Progress]]  # shown until training begins, and after it


def silence() -> AbstractContextManager[Progress]:
    return nullcontext(Progress.silent())


def learn(
    request: LearnRequest, bars: Bars = silence, prove: Prove = prove_lossless
) -> LearnResult | None:
    """Carry out a cycle; None on all ranks but the leading one."""
    began = time.monotonic()
    subject, work = subject_of(request), Work(request.work)
    with ExitStack() as held:
        with joined_ranks() as ranks:
            if ranks.is_leader:
                held.enter_context(work.locked())
            with bars() if ranks.is_leader else silence() as progress:
                cycle = prepare(subject, work, ranks, progress)
            run = make_run(subject, work, cycle.training, work.folder, ranks)
            at_first = run.validate()
            shown = Progress("learn", quiet=not ranks.is_leader)
            with shown as bar:
                numbers = run.train(progress_listener(bar, run))
            if not ranks.is_leader:
                return None
        adaptation = _write_candidate(subject, work, run, numbers, at_first)
        del run  # the engine wants its memory
        trial = Trial(
            target=subject.target,
            serving=subject.drafter.path,
            candidate=work.candidate,
            held_out=mix.read_part(work.mix, mix.HELD_OUT),
            base=mix.read_part(work.mix, mix.BASE),
            max_length=cycle.training.max_length,
            device=ranks.device,
        )
        with bars() as progress:
            result = _decide(subject, trial, adaptation, prove, progress)
        work.end()
    return result.model_copy(update={"seconds": time.monotonic() - began})


def _decide(
    subject: Subject, trial: Trial, adaptation: Adaptation, prove: Prove, progress: Progress
) -> LearnResult:
    config = subject.request.config
    evidence = gather(trial, prove, progress)
    decision = decide(evidence, Margins(gain=config.gain, base_loss=config.base_loss))
    version = None
    if decision.passed:
        decision, version = promote(
            subject.registry,
            trial.candidate,
            subject.target_fingerprint,
            decision,
            evidence,
            adaptation,
        )
    else:
        reject(subject.registry, decision, evidence, adaptation)
    return LearnResult(
        promoted=decision.passed,
        version=version,
        parent=subject.version,
        decision=decision,
        evidence=evidence,
        adaptation=adaptation,
        seconds=0.0,
    )


def _write_candidate(
    subject: Subject, work: Work, run: Run, numbers: RunStatus, at_first: Validation
) -> Adaptation:
    """The best weights in the format of the drafter that they came from, and how they were made."""
    parent = subject.drafter
    write_best(
        run,
        work.candidate,
        parent.format,
        parent.target_name or last_part(subject.request.target),
        parent.draft_tokens,
    )
    # The settings of the first training say which of the original data was held out.
    if (parent.path / SETTINGS).exists():
        shutil.copyfile(parent.path / SETTINGS, work.candidate / SETTINGS)
    adaptation = _adaptation(subject, run, numbers, at_first)
    travelling = adaptation.training.model_copy(update={"initial": f"version {subject.version}"})
    record = adaptation.model_copy(update={"training": travelling})
    _write(work.candidate / RECORD, record.model_dump_json(indent=2) + "\n")
    return record


def _adaptation(subject: Subject, run: Run, numbers: RunStatus, at_first: Validation) -> Adaptation:
    corpus = run.corpus
    trained = [corpus.samples.path_of(index).name for index in set(corpus.split.train)]
    return Adaptation(
        parent=subject.version,
        steps=numbers.step,
        best_step=numbers.best_step,
        minutes=numbers.seconds / 60,
        traffic_requests=trained.count(mix.TRAFFIC),
        replay_sequences=trained.count(mix.REPLAY),
        config=subject.request.config,
        training=run.config,
        curve=[
            _point(0, 0.0, at_first),
            *(
                _point(record.step, record.seconds, record.validation)
                for record in curves_of(read_log(run.folder)).validations
            ),
        ],
    )


def _point(step: int, seconds: float, validation: Validation) -> CurvePoint:
    lengths = {name: found.acceptance_length for name, found in validation.by_source.items()}
    return CurvePoint(step=step, minutes=seconds / 60, by_source=lengths)


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
