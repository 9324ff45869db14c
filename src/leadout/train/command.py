"""`leadout train`: train a drafter, export it, verify its acceptance in vLLM, and report."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from leadout.checkpoints import Format
from leadout.console import Progress
from leadout.data.manifest import DataFolder
from leadout.errors import LeadoutError, StoppedError
from leadout.evaluate.hidden_states import StateSource
from leadout.evaluate.ranks import Ranks, joined_ranks, require_equal, require_shared
from leadout.files import read_text, require_writable, write_text
from leadout.models import fingerprint, local_folder
from leadout.pairing import read_sizes, read_target, require_trainable
from leadout.provenance import Provenance, RunStart
from leadout.train.budget import (
    Budget,
    fit_to_budget,
    has_budget,
    outlook,
    require_no_epochs,
    without_repeated_budget,
)
from leadout.train.config import TrainConfig, TrainError
from leadout.train.export import (
    SETTINGS,
    ServedDiffersError,
    TrainReport,
    longest_served,
    require_agreement,
    serve_held_out,
    write_best,
    write_card_and_record,
)
from leadout.train.init import DEFAULT_POSITIONS
from leadout.train.loop import TrainingInterrupted
from leadout.train.plan import (
    TIMED_STEPS,
    Plan,
    Timing,
    answer_positions,
    make_plan,
    planned_source,
    time_steps,
)
from leadout.train.progress import (
    Record,
    curves_of,
    progress_listener,
    read_log,
)
from leadout.train.run import WORK, Corpus, Run, complete_settings, read_corpus, state_bytes
from leadout.train.state import RunStatus
from leadout.train.states_source import served_states
from leadout.train.trackers import require_trackers, tracker_listener

DRAFTER = "drafter"
DATA_HASH = "data-hash"
# Settings chosen automatically unless given; a continued run keeps what was chosen at first.
AUTOMATIC = ("layers", "target_layer_ids", "mask_token_id", "epochs")
# With a budget, these as well.
CHOSEN_FOR_BUDGET = ("anchors", "batch_sequences", "validate_every")
# Settings that a continued run may change: they do not change what is computed.
MAY_CHANGE = frozenset(
    {
        "attention", "compile", "micro_tokens", "packing", "patience", "recompute", "save_every",
        "sharded", "states_from", "validate_every",
    }
)  # fmt: skip
RUN_README = """\
The state of this training run. `leadout train ... --resume` needs it to continue the run; once the
drafter is written, the whole folder may be deleted.

state.safetensors  the last checkpoint: weights and optimizer state; with --sharded also
state-*.safetensors, the rows of the other ranks
best.safetensors   the weights with the best validation
log.jsonl          one line for each step and each validation
budget.json        what was chosen for --minutes or --tokens
states.bin, .marks hidden states of the target, kept to save time (the largest file); if deleted,
                   they are computed again
"""


# If the device is full before the first step.
_SMALLER = (
    "Take the target's states from a server on another device (--states-from), or, if a server is "
    "started on this one, leave room with --gpu-memory-utilization after `--`; set --recompute or "
    "a lower --micro-tokens, use --sharded on several devices, or, for a new run, fewer --layers."
)


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
    to: Format | None = None,
    resume: bool = False,
    trackers: Sequence[str] = (),
    vllm_flags: Sequence[str] = (),
) -> TrainReport | None:
    """Train a drafter for `target` on `data` into the folder `out`.

    `to` is the format of its file, by default that of z-lab unless the draft vocabulary is reduced.
    `vllm_flags` go to every engine that is started for it. Returns None on all ranks but the
    leader.
    """
    started = RunStart.now()
    to = _format(to, config)
    trackers = require_trackers(trackers)
    require_writable("--out", out)
    require_engine_flags(target, vllm_flags)
    earlier = _earlier_settings(out, resume)
    if earlier is not None:
        config = without_repeated_budget(config, out / WORK)
    inputs = _read_inputs(target, data, config, earlier)
    if earlier is not None:
        _require_same_run(out, earlier, inputs)
    _note_needless_vocabulary(inputs)
    words = ["leadout", "train", target, "--data", str(data), "--out", str(out), "--resume"]
    words += ["--format", to] if to != "zlab" else []
    words += [word for name in trackers for word in ("--tracker", name)]
    again = shlex.join([*words, "--", *vllm_flags] if vllm_flags else words)
    with joined_ranks() as ranks, _states(inputs, ranks, vllm_flags) as states:
        # Every rank has accepted the inputs before the leader writes.
        require_shared(ranks, "--out", out)
        if ranks.count > 1:  # machines may have copies of their own
            require_equal(ranks, f"--data {data}", inputs.corpus.content_hash)
            require_equal(ranks, f"The target {target}", fingerprint(inputs.target))
        with _full_device_explained(_SMALLER):
            inputs, budget = _within_budget(inputs, _given(config), ranks, states)
            if earlier is None and config.states == "auto":
                inputs = _without_needless_states(inputs, out, ranks)
            run = Run(inputs.target, inputs.corpus, inputs.config, out, ranks, states=states)
        run.require_room()
        if ranks.is_leader:  # all that is needed to continue the run
            run.folder.mkdir(parents=True, exist_ok=True)
            write_text(run.folder / DATA_HASH, inputs.corpus.content_hash)
            write_text(run.folder / "README.txt", RUN_README)
            if budget is not None:
                budget.write(run.folder)
            inputs.config.write(out / SETTINGS)
        remedy = (
            f"Continue with `{again}` and --micro-tokens below "
            f"{inputs.config.micro_tokens or 'the default'}, --recompute, --states-from with a "
            "server of the target's states on another device, or --sharded on several; fewer "
            "--anchors or --layers need another run."
        )
        try:
            with _full_device_explained(remedy):
                status = _train(run, out, trackers)
        except TrainingInterrupted as stopped:
            if not ranks.is_leader:
                raise
            raise StoppedError(
                f"Stopped at step {stopped.saved_step} of {stopped.steps}; continue with `{again}`."
            ) from None
        run.release()
        ranks.barrier()  # the engine may use the devices of all ranks
        if not ranks.is_leader:
            return None
    try:
        return _finish(run, inputs, status, out / DRAFTER, to, target, started, vllm_flags)
    except KeyboardInterrupt:
        raise StoppedError(
            f"Stopped after training, before the drafter was verified; continue with `{again}`."
        ) from None
    except ServedDiffersError:
        raise  # the result of the proof
    except LeadoutError as error:  # such as a full device, or servers of states that have ended
        raise TrainError(
            f"{error}\nTraining is complete, but the drafter was not verified and has no record; "
            f"once the cause is removed, verify it with `{again}`."
        ) from error


@contextmanager
def _full_device_explained(remedy: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).partition(". ")[0]
        raise TrainError(f"The device is full: {first}. {remedy}") from error


def _format(to: Format | None, config: TrainConfig) -> Format:
    if config.draft_vocab is None:
        return to or "zlab"
    if to == "zlab":
        raise TrainError(
            f"--draft-vocab {config.draft_vocab} requires --format speculators: the zlab format "
            "has no draft vocabulary."
        )
    return "speculators"


def plan(
    target: str, data: Path, config: TrainConfig, vllm_flags: Sequence[str] = ()
) -> Plan | None:
    """What `train` would take, from timing a few steps; None on all ranks but the leader."""
    inputs = _read_inputs(target, data, config, None)
    with joined_ranks() as ranks, tempfile.TemporaryDirectory() as scratch:
        with Progress("train", quiet=not ranks.is_leader) as progress:
            progress.say(
                f"loading the target and timing {TIMED_STEPS} steps of this run; this can take a "
                "few minutes on CPUs"
            )
        with _states(inputs, ranks, vllm_flags) as states, _full_device_explained(_SMALLER):
            inputs, _ = _within_budget(inputs, _given(config), ranks, states)
            run = Run(
                inputs.target, inputs.corpus, inputs.config, Path(scratch), ranks, states=states
            )
            made = make_plan(run, inputs.data, read_sizes(inputs.target))
        return made if ranks.is_leader else None


def _states(
    inputs: _Inputs, ranks: Ranks, vllm_flags: Sequence[str]
) -> AbstractContextManager[StateSource | None]:
    """The target's hidden states from servers, if the settings ask for them."""
    taps, corpus = inputs.config.target_layer_ids, inputs.corpus
    assert taps is not None
    # Also for the texts of the proof after training, for which a refusal would come late.
    positions = read_target(inputs.target).max_positions or DEFAULT_POSITIONS
    longest = max(*corpus.lengths, longest_served(corpus, positions))
    return served_states(inputs.target, taps, inputs.config, longest, ranks, vllm_flags)


def require_engine_flags(target: str, flags: Sequence[str]) -> None:
    """Refuse flags that vLLM does not know before training, not at the proof after it."""
    if flags:
        from leadout.engine.offline import SESSION_SETTINGS
        from leadout.engine.vllm_flags import engine_arguments

        engine_arguments(target, flags, TrainConfig, SESSION_SETTINGS)


def _given(config: TrainConfig) -> frozenset[str]:
    """The names of the settings that the user has set."""
    return frozenset(n for n in config.model_fields_set if getattr(config, n) is not None)


def _within_budget(
    inputs: _Inputs, given: frozenset[str], ranks: Ranks, states: StateSource | None
) -> tuple[_Inputs, Budget | None]:
    """The inputs with the settings chosen for a budget, and the budget, if there is one."""
    if not has_budget(inputs.config):
        return inputs, None

    def probe(config: TrainConfig) -> Timing:
        # A folder of its own: states left on disk would make the next timing too fast.
        with tempfile.TemporaryDirectory() as scratch:
            run = Run(inputs.target, inputs.corpus, config, Path(scratch), ranks, states=states)
            try:
                return time_steps(run)
            finally:
                run.release()  # its parts refer to each other, and the next run needs the device

    with Progress("train", quiet=not ranks.is_leader) as progress:
        if inputs.config.minutes is not None:
            progress.say("timing a few steps to choose settings for the budget")
        source = planned_source(inputs.config, served=states is not None)
        sizes = read_sizes(inputs.target)
        config, budget = fit_to_budget(
            inputs.config, given, sizes, inputs.corpus, source, ranks.count, probe
        )
        progress.say(budget.text())
    return replace(inputs, config=config), budget


def _note_needless_vocabulary(inputs: _Inputs) -> None:
    """The size is not refused: it is chosen before the text, which can take hours."""
    size, seen = inputs.config.draft_vocab, int((inputs.corpus.token_counts > 0).sum())
    if size is None or size <= seen:
        return
    with Progress("train", quiet=os.environ.get("RANK", "0") != "0") as progress:
        progress.say(
            f"the answers have {seen:,} different tokens; the others of --draft-vocab {size} are "
            "never drafted, and make every step a little longer"
        )


def _without_needless_states(inputs: _Inputs, out: Path, ranks: Ranks) -> _Inputs:
    """Compute states in every step if they would be read once only, or the disk is too full.

    The number of epochs may have been chosen for a budget, after the place of the states.
    """
    config = inputs.config
    if config.states != "disk" or config.target_layer_ids is None:
        return inputs
    taps, width = len(config.target_layer_ids), read_sizes(inputs.target).hidden_size
    needed = state_bytes(inputs.corpus, taps, width)
    disk = next(each for each in (out, *out.absolute().parents) if each.exists())
    has_room = ranks.broadcast(needed <= shutil.disk_usage(disk).free)
    if config.passes > 1 and has_room:
        return inputs
    if not has_room:
        with Progress("train", quiet=not ranks.is_leader) as progress:
            progress.say(
                f"the target's states are computed in every step: {needed / 1e9:,.0f} GB of them "
                f"do not fit on the disk of {out}"
            )
    return replace(inputs, config=config.model_copy(update={"states": "compute"}))


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
            "start one. A run on several machines needs an --out that all of them share."
        )
    return TrainConfig.resolve({}, resolved) if resume else None


def _read_inputs(
    target: str, data: Path, config: TrainConfig, earlier: TrainConfig | None
) -> _Inputs:
    if earlier is None:
        require_no_epochs(config)
    else:
        unset = [name for name in AUTOMATIC if getattr(config, name) is None]
        unset += [name for name in CHOSEN_FOR_BUDGET if name not in config.model_fields_set]
        # Chosen by the number of epochs, which a budget sets afterwards.
        unset += ["states"] if config.states == "auto" else []
        config = config.model_copy(update={name: getattr(earlier, name) for name in unset})
    folder = local_folder(target)
    require_trainable(folder, target)
    samples = DataFolder(data)
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
    if path.exists() and (expected := read_text(path)) != found:
        raise TrainError(
            f"--data {inputs.data.folder} has other samples (hash {found[:12]}) than the run in "
            f"{out} was started with ({expected[:12]}). Use that data, or start another run."
        )


def _train(run: Run, out: Path, trackers: Sequence[str]) -> RunStatus:
    is_leader = run.ranks.is_leader
    with ExitStack() as opened:
        progress = opened.enter_context(Progress("train", quiet=not is_leader))
        listeners = [progress_listener(progress, run)]
        if trackers and is_leader:
            tracked = tracker_listener(trackers, out, run.folder, run.config, progress.say)
            listeners.append(opened.enter_context(tracked))

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
    vllm_flags: Sequence[str],
) -> TrainReport:
    """Export the best weights, verify them in vLLM, and write the model card and the record."""
    data = inputs.data
    write_best(run, folder, to, target)
    with Progress("train") as progress:
        progress.say(f"wrote the drafter to {folder}; serving it on held-out prompts in vLLM")
    served = serve_held_out(run, inputs.target, folder, vllm_flags)
    records = list(read_log(run.folder))
    curves = curves_of(records)
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
        validation=curves.best,
        served=served,
        target_fingerprint=data.job.target_fingerprint,
        template_hash=data.job.template_hash,
        thinking=data.job.thinking,
        provenance=Provenance.of_this_run(models, started),
        budget=Budget.read(run.folder),
        outlook=outlook(
            curves.validations,
            [record.loss for record in curves.steps],
            run.config.passes * status.step / run.steps,  # fewer if --patience ended it
            run.blocks_per_step,
            answer_positions(inputs.corpus),
        ),
    )
    corpus = inputs.corpus
    prompts = (corpus.samples[index].prompt for index in corpus.split.train)
    write_card_and_record(folder, report, data, records, prompts)
    require_agreement(served, folder)
    return report
