"""Experiment trackers that a run reports to: TensorBoard, Weights & Biases, MLflow, trackio.

Each is an extra of the package and one function that returns a `Tracker`. A tracker is a
convenience: one that fails is switched off with a warning, and the run goes on.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from leadout.engine.fail_safe import FailSafe
from leadout.files import read_text, write_text
from leadout.train.config import TrainConfig, TrainError
from leadout.train.progress import Listener, Record, StepRecord

PROJECT = "leadout"
RUN_ID = "tracker-id"  # in the folder of the run: a continued run is the same run for trackers


class Tracker(Protocol):
    def log(self, scalars: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told about a run."""

    folder: Path
    name: str
    id: str
    settings: dict[str, Any]


def require_trackers(names: Sequence[str]) -> list[str]:
    """The names, which may be separated by commas, once each; their packages must be there."""
    chosen = list(dict.fromkeys(name.strip() for each in names for name in each.split(",")))
    for name in chosen:
        if name not in _OPEN:
            known = ", ".join(_OPEN)
            raise TrainError(f"--tracker {name}: expected one of {known}.")
        if find_spec(name) is None:
            raise TrainError(
                f"--tracker {name} requires the package {name}: pip install 'leadout[{name}]', or "
                "omit the flag; log.jsonl has the same numbers."
            )
    return chosen


@contextmanager
def tracker_listener(
    names: Sequence[str], out: Path, folder: Path, config: TrainConfig, warn: Callable[[str], None]
) -> Iterator[Listener]:
    """Reports records to trackers; `warn` gets one line for each that fails."""
    run = TrackedRun(folder, out.resolve().name, _run_id(folder), config.model_dump(mode="json"))
    opened: list[tuple[FailSafe, Tracker]] = []
    for name in names:
        safe = FailSafe(f"tracker {name}", report=lambda text: warn(f"{text} Training goes on."))
        with safe:
            opened.append((safe, _OPEN[name](run)))

    def listen(record: Record) -> None:
        for safe, tracker in opened:
            if safe.is_on:
                with safe:
                    tracker.log(scalars_of(record), record.step)

    try:
        yield listen
    finally:
        for safe, tracker in opened:
            with safe:
                tracker.close()


def scalars_of(record: Record) -> dict[str, float]:
    if isinstance(record, StepRecord):
        names = ("loss", "drafts_hit", "learning_rate")
        return {f"train/{name}": getattr(record, name) for name in names}
    found = record.validation
    by_source = {f"validation/{n}": a.acceptance_length for n, a in found.by_source.items()}
    return {"validation/acceptance_length": found.overall.acceptance_length, **by_source}


def _run_id(folder: Path) -> str:
    path = folder / RUN_ID
    if not path.exists():
        write_text(path, uuid.uuid4().hex)
    return read_text(path)


class _TensorBoard:
    """Event files in the folder of the run."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"))

    def log(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()  # without it the last records would be lost


class _Run:
    """A run of Weights & Biases, or of trackio, which has the same interface."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, scalars: dict[str, float], step: int) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()


def _open_wandb(run: TrackedRun) -> Tracker:
    made = import_module("wandb").init(
        project=PROJECT,
        name=run.name,
        id=run.id,
        resume="allow",
        config=run.settings,
        dir=str(run.folder),
    )
    return _Run(made)


def _open_trackio(run: TrackedRun) -> Tracker:
    made = import_module("trackio").init(
        project=PROJECT, name=f"{run.name}-{run.id[:8]}", resume="allow", config=run.settings
    )
    return _Run(made)


class _MLflow:
    """A run on the server of MLFLOW_TRACKING_URI, in the experiment of MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, run: TrackedRun) -> None:
        mlflow: Any = import_module("mlflow")
        self._client = mlflow.MlflowClient()
        experiment = mlflow.set_experiment(_mlflow_experiment()).experiment_id
        found = self._client.search_runs([experiment], f"tags.`leadout.run` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            return
        made = self._client.create_run(experiment, run_name=run.name, tags={"leadout.run": run.id})
        self._id = made.info.run_id
        for name, value in run.settings.items():
            self._client.log_param(self._id, name, value)

    def log(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._client.log_metric(self._id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _mlflow_experiment() -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)


_OPEN: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _open_wandb,
    "mlflow": _MLflow,
    "trackio": _open_trackio,
}
