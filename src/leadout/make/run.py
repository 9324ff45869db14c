"""`leadout make` as a function: costs, data, training, check and tuning, one after the other.

Whether a drafter of this budget can pay is decided after the first stage, before the long ones.
Each stage is a `leadout` command in a process of its own, and is recorded when it is complete; a
second call continues with the first stage that is not.
"""

from __future__ import annotations

import multiprocessing
import shlex
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from leadout.check.page import page as check_page
from leadout.check.payoff import payoff
from leadout.check.result import CheckResult, Verdict
from leadout.checkpoints import Format, write_checkpoint
from leadout.console import Progress
from leadout.control.tuned_file import Tuned, read_tuned
from leadout.data.manifest import Manifest
from leadout.data.prompts import read_prompts
from leadout.engine.offline import SESSION_SETTINGS
from leadout.engine.server_turns import devices_of
from leadout.errors import FAILED, INTERRUPTED, NEGATIVE, SUCCESS, StoppedError
from leadout.files import Timeout, lock, read_model, require_writable, write_text
from leadout.make.expected import expectation
from leadout.make.plan import (
    MIN_PROMPTS,
    STAGES,
    MakePlan,
    Subject,
    estimated_speed,
    make_plan,
    measured_speed,
    measured_times,
    training_gain,
)
from leadout.make.process import Command, Follow, reason, run_command, size_of
from leadout.make.result import MakeResult, Results, result_of, write_page
from leadout.make.settings import MakeError, MakeSettings
from leadout.make.stages import (
    Places,
    Stage,
    check_stage,
    costs_stage,
    data_stage,
    train_stage,
    tune_stage,
)
from leadout.make.state import STATE, MakeState, StageRecord, now
from leadout.models import fingerprint, local_folder
from leadout.pairing import read_sizes, read_target, require_trainable
from leadout.provenance import redacted
from leadout.train.export import TrainReport
from leadout.train.init import new_config, new_drafter
from leadout.tune.plan import BFLOAT16, ProductTimes

LOCK = "make.lock"
MIN_TRAIN_MINUTES = 1.0
MAX_DATA_TIME, MIN_DATA_SECONDS = 1.5, 60.0  # times the planned time

Runner = Callable[[Command, Follow], int]  # returns the exit code
Clock = Callable[[str], ProductTimes]  # in a torch dtype


# Engines for different stages need different values, or have flags of ours.
_FIXED = {
    **dict.fromkeys(SESSION_SETTINGS, "remove the flag"),
    **dict.fromkeys(("dtype", "max_model_len"), "write it before --"),
}


class StageFailedError(MakeError):
    """A stage ended with an error, which the message repeats."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is known before anything starts."""

    settings: MakeSettings
    subject: Subject
    fresh: MakeState  # of a run that begins now


def prepare(settings: MakeSettings) -> Preparation:
    """Report mistakes that would otherwise show after minutes or hours."""
    if settings.target.startswith("-"):
        raise MakeError(
            f"Expected the target before {settings.target}: `leadout make TARGET --out DIR`."
        )
    if settings.out.exists() and not settings.out.is_dir():
        raise MakeError(f"--out {settings.out} is a file, expected a folder. Choose another name.")
    require_writable("--out", settings.out)
    config = settings.training()
    if settings.max_new_tokens is not None and settings.max_new_tokens >= config.max_length:
        raise MakeError(
            f"--max-new-tokens {settings.max_new_tokens} must be less than the length of the texts "
            f"to train on, {config.max_length}, which includes the prompt. Add --max-length."
        )
    if settings.prompts:
        read_prompts(settings.prompts, limit=1)
    folder = local_folder(settings.target)
    require_trainable(folder, settings.target)
    if settings.vllm_flags:
        from leadout.engine.vllm_flags import engine_arguments

        engine_arguments(settings.target, settings.vllm_flags, MakeSettings, _FIXED)
    fresh = MakeState.started(settings, config, fingerprint(folder))
    return Preparation(settings, Subject(folder, read_sizes(folder), config), fresh)


def times_apart(precision: str) -> ProductTimes:
    """Timed in a process that ends: a product on a GPU would hold some of its memory until then."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        return apart.submit(ProductTimes.measured, precision).result()


def plan(settings: MakeSettings, clock: Clock = times_apart) -> MakePlan:
    """What would be done; with measured speeds if an earlier call has measured them."""
    ready = prepare(settings)
    state = _earlier(ready)
    if state is not None and state.plan is not None:
        return state.plan
    return _estimate(ready, clock)


def make(
    settings: MakeSettings,
    progress: Progress | None = None,
    runner: Runner = run_command,
    clock: Clock = times_apart,
) -> MakeResult:
    """Make a drafter, or continue to, or find out that it does not pay."""
    progress = progress or Progress.silent()
    ready = prepare(settings)
    if _earlier(ready) is None:
        _say(progress, _estimate(ready, clock).text())  # refuses a tiny budget
    settings.out.mkdir(parents=True, exist_ok=True)
    with _locked(settings.out):
        state = _earlier(ready)  # of a process that has ended since
        if state is None:
            state = ready.fresh
            state.write(settings.out)
        return _Maker(ready, state, progress, runner, clock).run()


def _say(progress: Progress, text: str) -> None:
    for line in text.splitlines():
        progress.say(line)


def _locked(out: Path) -> AbstractContextManager[object]:
    try:
        return lock(out / LOCK, seconds=0).acquire()
    except Timeout:
        raise MakeError(
            f"Another `leadout make` is running on --out {out}. Wait for its end, or choose "
            "another folder."
        ) from None


def _earlier(ready: Preparation) -> MakeState | None:
    """The state to continue from; refuses other settings and folders with other things in them."""
    out = ready.settings.out
    state = MakeState.read(out)
    if state is not None:
        state.require_same(ready.fresh, out)
        return state
    others = [] if not out.exists() else [each for each in out.iterdir() if each.name != LOCK]
    if others:
        raise MakeError(
            f"--out {out} has no {STATE} but other files, such as {others[0].name}. Choose a new "
            "folder."
        )
    return None


def _estimate(ready: Preparation, clock: Clock) -> MakePlan:
    times = _product_times(ready.settings, clock)
    gain, devices = training_gain(ready.settings.dtype), devices_of(ready.settings.vllm_flags)
    # Steps of the engine are shared by its devices; training has one process.
    speed = estimated_speed(ready.subject, times, gain, devices)
    times = times.divided_among(devices)
    return make_plan(ready.settings, ready.subject, speed, times)


def _product_times(settings: MakeSettings, clock: Clock) -> ProductTimes:
    return clock("float32" if settings.dtype == "float32" else BFLOAT16)


class _Maker:
    def __init__(
        self,
        ready: Preparation,
        state: MakeState,
        progress: Progress,
        runner: Runner,
        clock: Clock,
    ) -> None:
        self._settings, self._subject, self._state = ready.settings, ready.subject, state
        self._places = Places(ready.settings.out)
        self._progress, self._runner, self._clock = progress, runner, clock

    def run(self) -> MakeResult:
        settings, places = self._settings, self._places
        costs = self._costs()
        planned = self._plan(costs)
        expected = expectation(planned.blocks, costs)
        self._save(self._state.model_copy(update={"plan": planned, "expectation": expected}))
        self._progress.say(expected.sentence())
        if expected.stops and not settings.anyway:
            return self._finish(Results(costs=costs))
        self._do(data_stage(settings, places, planned, self._data_seconds(planned)))
        self._do(train_stage(settings, places, self._training_budget(planned)))
        self._require_same_drafter()
        self._do(check_stage(settings, places))
        results = Results(
            costs=costs,
            data=Manifest.read(places.manifest),
            training=read_model(places.record, TrainReport),
            check=read_model(places.check, CheckResult),
        )
        assert results.check is not None
        if results.check.verdict is Verdict.UNFIT:
            return self._finish(results)
        self._do(tune_stage(settings, places))
        tuned = read_tuned(places.tuned)
        return self._finish(results.with_tuned(tuned, self._with_payoff(results.check, tuned)))

    def _costs(self) -> Tuned:
        """Measured with random weights: the time of a step depends on the shape alone."""
        stage = costs_stage(self._settings, self._places)
        if not self._is_done(stage):
            _write_shape(self._subject, self._settings, self._places.shape)
        self._do(stage)
        shutil.rmtree(self._places.shape, ignore_errors=True)
        return read_tuned(self._places.costs)

    def _plan(self, costs: Tuned) -> MakePlan:
        if self._state.plan is not None:  # data may have been started with its sizes
            return self._state.plan
        products = _product_times(self._settings, self._clock)
        gain, devices = training_gain(self._settings.dtype), devices_of(self._settings.vllm_flags)
        times = measured_times(self._subject, costs, products.divided_among(devices))
        # Training has one process, and measured passes were those of all devices.
        speed = measured_speed(self._subject, costs, times, gain / devices)
        spent = self._state.seconds.get("costs", 0.0)
        planned = make_plan(self._settings, self._subject, speed, times, spent)
        _say(self._progress, planned.text().partition("\n")[2])  # without the stage that is done
        return planned

    def _data_seconds(self, planned: MakePlan) -> float | None:
        """How long text may be generated; None with a budget of tokens."""
        if self._settings.seconds is None:
            return None
        (minutes,) = (stage.minutes for stage in planned.stages if stage.name == "data")
        left = MAX_DATA_TIME * 60 * minutes - self._state.seconds.get("data", 0.0)
        return max(left, MIN_DATA_SECONDS)

    def _training_budget(self, planned: MakePlan) -> list[str]:
        if planned.train_tokens is not None:
            return ["--tokens", str(planned.train_tokens)]
        minutes = self._state.train_minutes
        if minutes is None:
            assert planned.train_minutes is not None
            assert self._settings.seconds is not None
            by_name = {stage.name: stage.minutes for stage in planned.stages}
            proof = by_name["train"] - planned.train_minutes
            later = proof + by_name["check"] + by_name["tune"]
            left = (self._settings.seconds - self._state.spent) / 60 - later
            minutes = round(max(left, MIN_TRAIN_MINUTES), 1)
            self._save(self._state.model_copy(update={"train_minutes": minutes}))
        return ["--minutes", f"{minutes:g}"]

    def _is_done(self, stage: Stage) -> bool:
        return stage.name in self._state.stages and stage.file.exists()

    def _do(self, stage: Stage) -> None:
        """Run a stage, unless it is complete."""
        number = STAGES.index(stage.name) + 1
        title = f"{number}/{len(STAGES)} {stage.title}"
        if self._is_done(stage):
            self._progress.say(f"{title}: done before")
            return
        self._save(self._state.without_stages_from(stage.name))
        if not stage.keeps:
            stage.file.unlink(missing_ok=True)
        logs = self._places.logs
        log, result = logs / f"{stage.name}.log", logs / f"{stage.name}.json"
        command = Command(stage.words, log, result, stage.seconds)
        advance = self._progress.stage(title, 1)

        def follow(line: str) -> None:
            if self._progress.has_bars:
                advance(0, note=line)
            else:
                self._progress.say(f"{title}: {line}")

        began, is_stopped, since = time.monotonic(), False, size_of(log)
        try:
            code = self._runner(command, follow)
        except KeyboardInterrupt:
            code, is_stopped = INTERRUPTED, True
        finally:
            spent = time.monotonic() - began
            self._save(self._state.with_seconds(stage.name, spent))
        is_over_time = stage.seconds is not None and spent >= stage.seconds and not is_stopped
        if code == INTERRUPTED and is_over_time and stage.file.exists():
            self._require_text(title)
            code = SUCCESS
        if code == INTERRUPTED:
            raise StoppedError(f"Stopped in stage {title}. Run the same command again to continue.")
        if code not in stage.codes or not stage.file.exists():
            error = StageFailedError(
                f"Stage {title} failed: {reason(command.log, code, since)}\nIts log is "
                f"{command.log}. Run the same command again to continue from there."
                + (self._other_training(stage) if stage.name == "train" else "")
            )
            error.exit_code = NEGATIVE if code == NEGATIVE else FAILED
            raise error
        advance()
        record = StageRecord(
            file=str(stage.file.relative_to(self._places.out)),
            exit_code=code,
            seconds=self._state.seconds[stage.name],
            ended=now(),
            fingerprint=fingerprint(self._places.drafter) if stage.name == "train" else None,
        )
        self._save(self._state.with_stage(stage.name, record))

    def _require_text(self, title: str) -> None:
        """Text whose time is over is complete if there is enough of it to train on."""
        counts = Manifest.read(self._places.manifest).counts
        samples = sum(each.samples for each in counts.values())
        if samples < MIN_PROMPTS:
            raise StageFailedError(
                f"Stage {title} has {samples} answers after the time that --hours leaves for it, "
                f"expected at least {MIN_PROMPTS}. They are kept, but one folder has one budget: "
                "start again in another --out with more --hours or a smaller --max-new-tokens."
            )
        self._progress.say(f"{title}: the time for it is over; training takes {samples:,} answers")

    def _other_training(self, stage: Stage) -> str:
        """How to change a setting of training without generating the text anew."""
        has_begun = self._places.training.exists()
        if has_begun:  # in this attempt, maybe
            stage = train_stage(self._settings, self._places, [])
        words = ["leadout", *(word for word in stage.words if word != "--json")]
        command = shlex.join(redacted(words))  # errors end up in logs
        where = " before the --" if "--" in stage.words else ""
        if has_begun:
            return (
                f" If it needs less memory, run `{command}` with --micro-tokens N or --recompute"
                f"{where}, and then the same `leadout make`."
            )
        return (
            f" To train with other settings on the same text, run `{command}` with them{where}, "
            "and then the same `leadout make`."
        )

    def _require_same_drafter(self) -> None:
        """Check and tuned file must be of the drafter that was trained."""
        expected, found = self._state.stages["train"].fingerprint, fingerprint(self._places.drafter)
        if expected != found:
            raise MakeError(
                f"{self._places.drafter} has changed since it was trained (fingerprint "
                f"{found[:12]}, expected {str(expected)[:12]}). Restore it, or choose another "
                "--out."
            )

    def _with_payoff(self, check: CheckResult, tuned: Tuned) -> CheckResult:
        """The check was made before the costs of the trained drafter were known."""
        if check.offline is None:
            return check
        check = check.model_copy(update={"pays": payoff(check.offline, tuned)})
        write_text(self._places.check, check.model_dump_json(indent=2) + "\n")
        write_text(self._places.check_page, check_page(check))
        return check

    def _finish(self, results: Results) -> MakeResult:
        made = result_of(self._settings, self._state, self._places, results)
        write_page(made, results, self._state, self._places.page)
        return made

    def _save(self, state: MakeState) -> None:
        self._state = state
        state.write(self._places.out)


def _write_shape(subject: Subject, settings: MakeSettings, folder: Path) -> None:
    """A drafter of the planned shape with random weights."""
    import torch

    config, facts = subject.config, read_target(subject.folder)
    mask = facts.vocab_size - 1 if config.mask_token_id is None else config.mask_token_id
    shape = new_config(
        subject.folder,
        layers=subject.layers,
        block_size=config.block_size,
        target_layer_ids=subject.taps,
        mask_token_id=mask,
        window=config.window,
        mlp_width=config.mlp_width,
        draft_vocab=config.draft_vocab,
    )
    dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
    weights = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in new_drafter(shape, seed=0).state_dict().items()
    }
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted attempt
    folder.parent.mkdir(parents=True, exist_ok=True)
    to: Format = "zlab" if config.draft_vocab is None else "speculators"
    write_checkpoint(folder, weights, shape, to, target_name=settings.target)
