"""`leadout train`: train a drafter, export it, verify its acceptance in vLLM, and report."""

from __future__ import annotations

import shlex
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from leadout.checkpoints import Format
from leadout.console import Progress
from leadout.data.manifest import DataFolder
from leadout.errors import StoppedError
from leadout.evaluate.ranks import joined_ranks
from leadout.files import require_writable, write_text
from leadout.models import fingerprint, local_folder
from leadout.pairing import read_target
from leadout.provenance import Provenance, RunStart
from leadout.train.config import TrainConfig, TrainError
from leadout.train.export import (
    SETTINGS,
    TrainReport,
    require_agreement,
    serve_held_out,
    write_best,
    write_card_and_record,
)
from leadout.train.loop import TrainingInterrupted
from leadout.train.plan import TIMED_STEPS, Plan, make_plan
from leadout.train.progress import (
    Record,
    curves_of,
    progress_listener,
    read_log,
    require_tensorboard,
    tensorboard_listener,
)
from leadout.train.run import WORK, Corpus, Run, complete_settings, read_corpus
from leadout.train.state import RunStatus

DRAFTER = "drafter"
DATA_HASH = "data-hash"
# Settings chosen automatically unless given; a continued run keeps what was chosen at first.
AUTOMATIC = ("layers", "target_layer_ids", "mask_token_id")
# Settings that a continued run may change: they do not change what is computed.
MAY_CHANGE = frozenset({"save_every", "validate_every", "micro_tokens", "compile", "patience"})
RUN_README = """\
The state of this training run. `leadout train ... --resume` needs it to continue the run; once the
drafter is written, the whole folder may be deleted.

state.safetensors  the last checkpoint: weights and optimizer state
best.safetensors   the weights with the best validation
log.jsonl          one line for each step and each validation
states.bin, .marks hidden states of the target, kept to save time (the largest file); if deleted,
                   they are computed again
"""


@dataclass(frozen=True, slots=True)
class _Inputs:
    target: Path
    data: DataFolder
    corpus: Corpus
    config: TrainConfig  # complete


def train(
    target: str,
    data: Path,
    out: Path,
    config: TrainConfig,
    *,
    to: Format = "zlab",
    resume: bool = False,
    tensorboard: bool = False,
) -> TrainReport | None:
    """Train a drafter for `target` on `data` into the folder `out`.

    Returns None on all ranks but the leader.
    """
    started = RunStart.now()
    if tensorboard:
        require_tensorboard()
    require_writable("--out", out)
    earlier = _earlier_settings(out, resume)
    inputs = _read_inputs(target, data, config, earlier)
    if earlier is not None:
        _require_same_run(out, earlier, inputs)
    words = ["leadout", "train", target, "--data", str(data), "--out", str(out), "--resume"]
    again = shlex.join(words if to == "zlab" else [*words, "--format", to])
    with joined_ranks() as ranks:
        ranks.barrier()  # every rank has accepted the inputs before the leader writes
        run = Run(inputs.target, inputs.corpus, inputs.config, out, ranks)
        if ranks.is_leader:  # all that is needed to continue the run
            run.folder.mkdir(parents=True, exist_ok=True)
            write_text(run.folder / DATA_HASH, inputs.corpus.content_hash)
            write_text(run.folder / "README.txt", RUN_README)
            inputs.config.write(out / SETTINGS)
        try:
            status = _train(run, tensorboard)
        except TrainingInterrupted as stopped:
            if not ranks.is_leader:
                raise
            raise StoppedError(
                f"Stopped at step {stopped.saved_step} of {stopped.steps}; continue with `{again}`."
            ) from None
        if not ranks.is_leader:
            return None
    try:
        return _finish(run, inputs, status, out / DRAFTER, to, target, started)
    except KeyboardInterrupt:
        raise StoppedError(
            f"Stopped after training, before the drafter was verified; continue with `{again}`."
        ) from None


def plan(target: str, data: Path, config: TrainConfig) -> Plan | None:
    """What `train` would take, from timing a few steps; None on all ranks but the leader."""
    inputs = _read_inputs(target, data, config, None)
    with joined_ranks() as ranks, tempfile.TemporaryDirectory() as scratch:
        with Progress("train", quiet=not ranks.is_leader) as progress:
            progress.say(
                f"loading the target and timing {TIMED_STEPS} steps of this run; this can take a "
                "few minutes on CPUs"
            )
        run = Run(inputs.target, inputs.corpus, inputs.config, Path(scratch), ranks)
        made = make_plan(run, inputs.data)
        return made if ranks.is_leader else None


def what_next(report: TrainReport, target: str, out: Path) -> str:
    """What was written, what may be deleted, and the next step."""
    size = sum(path.stat().st_blocks * 512 for path in (out / WORK).rglob("*"))
    return (
        f"Wrote {report.drafter} (weights, model card, settings and records).\n"
        f"{out / WORK} ({size / 1e6:,.0f} MB) is needed only for --resume and may be deleted.\n"
        f"Next: {shlex.join(['leadout', 'check', target, report.drafter])}"
    )


def _earlier_settings(out: Path, resume: bool) -> TrainConfig | None:
    """The settings of the run to continue; None for a new run, which needs a new folder."""
    resolved = out / SETTINGS
    if not resume and resolved.exists():
        raise TrainError(
            f"--out {out} already holds a run. Use --resume to continue it, or choose another "
            "folder."
        )
    if resume and not resolved.exists():
        raise TrainError(
            f"--out {out} has no {SETTINGS}, so there is no run to continue. Omit --resume to "
            "start one."
        )
    return TrainConfig.resolve({}, resolved) if resume else None


def _read_inputs(
    target: str, data: Path, config: TrainConfig, earlier: TrainConfig | None
) -> _Inputs:
    if earlier is not None:
        unset = [name for name in AUTOMATIC if getattr(config, name) is None]
        config = config.model_copy(update={name: getattr(earlier, name) for name in unset})
    folder, samples = local_folder(target), DataFolder(data)
    vocab_size = read_target(folder).vocab_size
    corpus = read_corpus(samples, folder, config, vocab_size)
    return _Inputs(folder, samples, corpus, complete_settings(config, folder, corpus, vocab_size))


def _require_same_run(out: Path, earlier: TrainConfig, inputs: _Inputs) -> None:
    """A continued run keeps settings and samples: states and sample order depend on both."""
    for name in TrainConfig.model_fields:
        before, now = getattr(earlier, name), getattr(inputs.config, name)
        if before != now and name not in MAY_CHANGE:
            raise TrainError(
                f"{TrainConfig.flag_of(name)} {now} differs from the run in {out}, which was "
                f"started with {before}. A continued run keeps its settings: omit the flag, or "
                "start another run."
            )
    path, found = out / WORK / DATA_HASH, inputs.corpus.content_hash
    if path.exists() and (expected := path.read_text()) != found:
        raise TrainError(
            f"--data {inputs.data.folder} has other samples (hash {found[:12]}) than the run in "
            f"{out} was started with ({expected[:12]}). Use that data, or start another run."
        )


def _train(run: Run, tensorboard: bool) -> RunStatus:
    is_leader = run.ranks.is_leader
    with ExitStack() as opened:
        progress = opened.enter_context(Progress("train", quiet=not is_leader))
        listeners = [progress_listener(progress, run)]
        if tensorboard and is_leader:
            listeners.append(opened.enter_context(tensorboard_listener(run.folder)))

        def listen(record: Record) -> None:
            for listener in listeners:
                listener(record)

        return run.train(listen)


def _finish(
    run: Run,
    inputs: _Inputs,
    status: RunStatus,
    folder: Path,
    to: Format,
    target: str,
    started: RunStart,
) -> TrainReport:
    """Export the best weights, verify them in vLLM, and write the model card and the record."""
    data = inputs.data
    write_best(run, folder, to, target)
    with Progress("train") as progress:
        progress.say(f"wrote the drafter to {folder}; serving it on held-out prompts in vLLM")
    served = serve_held_out(run, inputs.target, folder)
    records = list(read_log(run.folder))
    models = {"target": data.job.target_fingerprint, "drafter": fingerprint(folder)}
    report = TrainReport(
        target=data.job.target,
        drafter=str(folder),
        steps=status.step,
        best_step=status.best_step,
        minutes=status.seconds / 60,
        data_hash=inputs.corpus.content_hash,
        response_tokens=data.response_tokens,
        config=run.config,
        validation=curves_of(records).best,
        served=served,
        target_fingerprint=data.job.target_fingerprint,
        template_hash=data.job.template_hash,
        thinking=data.job.thinking,
        provenance=Provenance.of_this_run(models, started),
    )
    corpus = inputs.corpus
    prompts = (corpus.samples[index].prompt for index in corpus.split.train)
    write_card_and_record(folder, report, data, records, prompts)
    require_agreement(served, folder)
    return report
