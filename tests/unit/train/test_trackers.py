"""Trackers: what each gets, packages that are missing, and failures that do not end a run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leadout.evaluate.acceptance import Acceptance, Validation
from leadout.train import trackers
from leadout.train.config import TrainError
from leadout.train.progress import Record, StepRecord, ValidationRecord
from leadout.train.trackers import require_trackers, tracker_listener
from support.small_runs import small_config

FOUND = Acceptance(acceptance_length=1.75, by_position=[], steps=9, every_position=1.5, positions=9)


def step(number: int) -> StepRecord:
    return StepRecord(
        step=number,
        seconds=1.0,
        loss=2.5 - number,
        learning_rate=1e-3,
        gradient_norm=0.5,
        blocks_per_second=100.0,
        drafts_hit=1.25,
    )


RECORDS: list[Record] = [
    step(1),
    ValidationRecord(
        step=1, seconds=1.0, validation=Validation(overall=FOUND, by_source={"code": FOUND})
    ),
    step(2),
]


class FakeRun:
    """A run of Weights & Biases or trackio, or of a server that is gone after some calls."""

    def __init__(self, works: int = 99) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []
        self.calls, self.works, self.finished = 0, works, False

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.calls += 1
        if self.calls > self.works:
            raise ConnectionError("no route to the server")
        self.logged.append((scalars, step))

    def finish(self) -> None:
        self.finished = True


def track(folder: Path, *names: str, warnings: list[str] | None = None) -> list[str]:
    said: list[str] = [] if warnings is None else warnings
    config = small_config()
    with tracker_listener(names, folder / "my-run", folder, config, said.append) as listen:
        for record in RECORDS:
            listen(record)
    return said


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_runs_get_settings_and_all_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    started: list[dict[str, Any]] = []
    runs: list[FakeRun] = []

    def init(**settings: Any) -> FakeRun:
        started.append(settings)
        runs.append(FakeRun())
        return runs[-1]

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init))  # type: ignore[arg-type]
    assert track(tmp_path, name) == []
    assert started[0]["project"] == "leadout"
    assert started[0]["config"]["block_size"] == 5
    assert started[0]["name"].startswith("my-run")
    assert runs[0].logged == [
        ({"train/loss": 1.5, "train/drafts_hit": 1.25, "train/learning_rate": 1e-3}, 1),
        ({"validation/acceptance_length": 1.75, "validation/code": 1.75}, 1),
        ({"train/loss": 0.5, "train/drafts_hit": 1.25, "train/learning_rate": 1e-3}, 2),
    ]
    assert runs[0].finished
    track(tmp_path, name)  # continued
    assert started[1] == started[0]
    assert started[1]["resume"] == "allow"


def test_a_tracker_that_fails_is_switched_off_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone, well = FakeRun(works=1), FakeRun()
    fake_wandb = SimpleNamespace(init=lambda **_: gone)
    fake_trackio = SimpleNamespace(init=lambda **_: well)
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "trackio", fake_trackio)  # type: ignore[arg-type]
    (warning,) = track(tmp_path, "wandb", "trackio")
    assert warning == (
        "tracker wandb is off after an error: ConnectionError: no route to the server. Training "
        "goes on."
    )
    assert (gone.calls, len(well.logged)) == (2, 3)


def test_a_tracker_that_cannot_be_opened_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError("not logged in")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse))  # type: ignore[arg-type]
    (warning,) = track(tmp_path, "wandb")
    assert "tracker wandb is off after an error: PermissionError: not logged in" in warning


def test_an_unknown_tracker_and_a_missing_package_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TrainError, match="--tracker neptune: expected one of tensorboard, wandb"):
        require_trackers(["tensorboard,neptune"])
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    for name in ("tensorboard", "wandb", "mlflow", "trackio"):
        with pytest.raises(TrainError, match=rf"pip install 'leadout\[{name}\]'"):
            require_trackers([name])


def test_names_may_be_repeated_or_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: object())
    assert require_trackers(["wandb, mlflow", "tensorboard", "wandb"]) == [
        "wandb",
        "mlflow",
        "tensorboard",
    ]
    assert require_trackers([]) == []


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert track(tmp_path, "tensorboard") == []
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 1.5), (2, 0.5)]
    assert [event.value for event in events.Scalars("validation/code")] == [1.75]


def test_mlflow_stores_one_run_also_when_it_is_continued(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "store"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # other stores need a database
    assert track(tmp_path, "mlflow") == []
    assert track(tmp_path, "mlflow") == []
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("leadout").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    assert run.data.params["block_size"] == "5"
    losses = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")]
    assert losses[:2] == [(1, 1.5), (2, 0.5)]
