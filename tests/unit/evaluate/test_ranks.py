"""Two processes compute the same as one: gradients, validation, final weights and log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from leadout.data.manifest import DataFolder
from leadout.train.progress import read_log
from support.models import ROOT
from support.small_runs import ALONE, small_config
from support.train_rank import FINAL, FIRST, VALIDATION, train_and_write

# An odd batch, so that the ranks have different numbers of sequences, and blocks.
CONFIG = small_config(batch_sequences=5, epochs=0.5, states="disk", optimizer="adamw")


@pytest.fixture(scope="module")
def by_two(target_folder: Path, data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    rank = ["--nproc-per-node", "2", "-m", "support.train_rank"]
    ended = subprocess.run(
        [*torchrun, *rank, target_folder, data.folder, CONFIG.model_dump_json(), out],
        cwd=ROOT / "tests",
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def by_one(target_folder: Path, data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one")
    train_and_write(target_folder, data, CONFIG, out, ALONE)
    return out


def test_gradients_are_equal(by_one: Path, by_two: Path) -> None:
    expected, found = load_file(by_one / FIRST), load_file(by_two / FIRST)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        largest = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, atol=1e-5 * largest, rtol=1e-5)


def test_validation_is_equal(by_one: Path, by_two: Path) -> None:
    assert (by_two / VALIDATION).read_text() == (by_one / VALIDATION).read_text()


def test_a_complete_run_is_equal(by_one: Path, by_two: Path) -> None:
    expected, found = load_file(by_one / FINAL), load_file(by_two / FINAL)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-4, rtol=1e-3)
    logs = [[(r.kind, r.step) for r in read_log(out / "run")] for out in (by_one, by_two)]
    assert logs[0] == logs[1]
    losses = [
        [r.loss for r in read_log(out / "run") if r.kind == "step"] for out in (by_one, by_two)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
