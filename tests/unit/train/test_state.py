"""Master weights, and checkpoints that survive a kill."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leadout.train.state import (
    BEST,
    MasterWeights,
    RunStatus,
    read_status,
    save_best,
    save_state,
)
from support.small_runs import KilledError, MakeRun


def test_small_updates_are_kept_by_the_master_weights() -> None:
    layer = nn.Linear(2, 2, bias=False)
    weights = MasterWeights(layer, torch.bfloat16)
    weights.load({"weight": torch.ones(2, 2)})
    for _ in range(100):  # each too small for bfloat16
        weights.masters["weight"].data += 1e-3
        weights.update_drafter()
    assert layer.weight.dtype == torch.bfloat16
    torch.testing.assert_close(layer.weight.float(), torch.full((2, 2), 1.1), atol=5e-3, rtol=0)


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

    monkeypatch.setattr("leadout.train.state.save_file", dies)
    with pytest.raises(KilledError):
        save_best(run.folder, run.weights)
    assert (run.folder / BEST).read_bytes() == before
