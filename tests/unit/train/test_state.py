"""The learning rate, which weights each optimizer updates, and checkpoints that survive a kill."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leadout.train.config import TrainConfig
from leadout.train.state import (
    BEST,
    MasterWeights,
    RunStatus,
    learning_rate_at,
    make_optimizers,
    read_status,
    save_best,
    save_state,
)
from support.small_runs import KilledError, MakeRun


def test_learning_rate_warmup_and_decay() -> None:
    config = TrainConfig(learning_rate=1.0, warmup=0.1)
    rates = [learning_rate_at(step, 100, config) for step in range(100)]
    assert rates[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.5)
    assert 0 < rates[99] < 0.001


def test_only_matrices_have_weight_decay_and_muon() -> None:
    weights = {"matrix": nn.Parameter(torch.ones(2, 3)), "norm": nn.Parameter(torch.ones(3))}
    (adamw,) = make_optimizers(weights, TrainConfig(optimizer="adamw", weight_decay=0.1))
    groups = {group["weight_decay"]: group["params"] for group in adamw.param_groups}
    assert groups[0.1][0] is weights["matrix"]
    assert groups[0.0][0] is weights["norm"]
    muon, adam = make_optimizers(weights, TrainConfig(optimizer="muon"))
    assert type(muon).__name__ == "Muon"
    assert muon.param_groups[0]["params"][0] is weights["matrix"]
    assert adam.param_groups[0]["params"][0] is weights["norm"]
    assert adam.param_groups[0]["weight_decay"] == 0


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
