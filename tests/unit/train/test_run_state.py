"""Checkpoints: a kill while saving keeps the previous one; the status is read back."""

from __future__ import annotations

import pytest

from leadout.train.run_state import BEST, RunStatus, read_status, save_best, save_state
from support.small_runs import KilledError, MakeRun


def test_the_status_is_read_from_the_last_checkpoint(make_run: MakeRun) -> None:
    run = make_run()
    assert read_status(run.folder) is None
    status = RunStatus(step=3, best_step=2, best_acceptance=1.5)
    save_state(run.folder, run.weights, [], status)
    assert read_status(run.folder) == status


def test_a_kill_while_saving_keeps_the_last_checkpoint(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    save_best(run.folder, run.weights)
    before = (run.folder / BEST).read_bytes()

    def dies(*_: object, **__: object) -> None:
        raise KilledError

    monkeypatch.setattr("leadout.train.run_state.save_file", dies)
    with pytest.raises(KilledError):
        save_best(run.folder, run.weights)
    assert (run.folder / BEST).read_bytes() == before
