"""The learning rate, which weights each optimizer updates, and Muon shared out over ranks.

Also folders that ranks do not share, which need ranks as well.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import Muon

from leadout.evaluate import hidden_states
from leadout.train.config import TrainConfig
from leadout.train.optimizer import (
    SharedMuon,
    learning_rate_at,
    make_optimizers,
    orthogonalized,
    share_out,
    symmetric_product,
)
from support.rank_parts import SHAPES, make_muon, matrices, train_with
from support.torchrun import torchrun


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
    assert isinstance(muon, Muon)
    assert muon.param_groups[0]["params"][0] is weights["matrix"]
    assert adam.param_groups[0]["params"][0] is weights["norm"]
    assert adam.param_groups[0]["weight_decay"] == 0


def test_on_cpus_muon_is_torchs_in_float32() -> None:
    ours, torchs = matrices(), matrices()
    muon = make_muon(ours)
    train_with(muon, ours)
    settings = {**muon.defaults}
    train_with(Muon(list(torchs.values()), **settings), torchs)
    for name, start in matrices().items():
        moved = (torchs[name] - start).norm()
        assert moved > 0
        # torch's iterations are in bfloat16.
        assert (ours[name] - torchs[name]).norm() < 0.05 * moved


@pytest.mark.parametrize(
    "shape", [(24, 24), (24, 40), (24, 64), (64, 24), (16, 160), (300, 900)], ids=str
)
def test_long_matrices_are_orthogonalized_as_others_are(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    few = torch.randn(shape[0], 3) @ torch.randn(3, shape[1])  # large directions of a gradient
    update = few + 0.01 * torch.randn(shape)
    coefficients = (3.4445, -4.7750, 2.0315)
    expected = update.double() / update.double().norm()
    for _ in range(5):
        gram = expected @ expected.T
        linear, cubic, quintic = coefficients
        expected = linear * expected + (cubic * gram + quintic * gram @ gram) @ expected
    found = orthogonalized(update, coefficients, 5)
    assert found.shape == shape
    assert found.is_contiguous()
    assert (found - expected).norm() < 1e-3 * expected.norm()
    values = torch.linalg.svdvals(found)[:3]
    assert ((values > 0.5) & (values < 1.5)).all()


@pytest.mark.parametrize("shape", [(24, 24), (64, 24), (16, 160), (300, 900)], ids=str)
def test_updates_in_bfloat16_are_orthogonal(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    update = torch.randn(shape)
    coefficients = (3.4445, -4.7750, 2.0315)
    found = orthogonalized(update, coefficients, 5, torch.bfloat16)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    values = torch.linalg.svdvals(found)
    assert ((values > 0.5) & (values < 1.5)).mean(dtype=torch.float32) > 0.9
    exact = orthogonalized(update, coefficients, 5)
    assert (found - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("ranks", [1, 2])
def test_muon_iterates_on_cpus_in_the_precision_of_the_run(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"matrix": nn.Parameter(torch.ones(2, 3)), "norm": nn.Parameter(torch.ones(3))}
    types = []
    for precision, has_instructions in (("float32", True), ("bfloat16", True), ("bfloat16", False)):
        monkeypatch.setattr(hidden_states, "_has_bfloat16", lambda has=has_instructions: has)
        config = TrainConfig(optimizer="muon", precision=precision)
        muon, _ = make_optimizers(weights, config, ranks)
        assert isinstance(muon, SharedMuon)
        types.append(muon.on_cpus)
    assert types == [torch.float32, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("rows", [1, 255, 257, 600, 1300])
def test_a_product_of_which_half_is_computed_is_whole(rows: int) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(rows, 64, dtype=torch.float64)
    found = symmetric_product(matrix, matrix.T)
    assert torch.equal(found, found.T)
    torch.testing.assert_close(found, matrix @ matrix.T)


def test_every_rank_has_about_the_same_work() -> None:
    assert share_out([(4, 8), (4, 8), (4, 8), (4, 8)], 2) == [0, 1, 0, 1]
    # One large matrix costs as much as several small ones, whatever their order.
    owners = share_out([(10, 10), (10, 10), (20, 10), (10, 10)], 2)
    assert owners[2] != owners[0] or owners[2] != owners[1]
    work = [0, 0]
    for shape, owner in zip(SHAPES, share_out(SHAPES, 2), strict=True):
        work[owner] += min(shape) ** 2 * max(shape)
    assert 0.5 < work[0] / work[1] < 2
    assert share_out([(3, 3)], 1) == [0]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("muon")
    torchrun("support.rank_parts", out)
    return out


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_shared_updates_equal_those_of_one_rank(shared: Path, kind: str) -> None:
    alone = matrices()
    train_with(make_muon(alone), alone)
    before = matrices()
    for rank in range(2):
        found = load_file(shared / f"{kind}-{rank}.safetensors")
        for name, expected in alone.items():
            moved = (expected - before[name]).abs().max().item()
            assert moved > 1e-3
            torch.testing.assert_close(found[name], expected.detach(), atol=1e-5 * moved, rtol=1e-6)


def test_each_matrix_is_orthogonalized_by_one_rank(shared: Path) -> None:
    counts = [int((shared / f"orthogonalized-{rank}").read_text()) for rank in range(2)]
    assert all(counts)
    assert sum(counts) == len(SHAPES)


def test_a_folder_that_ranks_do_not_share_is_refused(shared: Path) -> None:
    for rank in range(2):
        message = (shared / f"not-shared-{rank}").read_text()
        assert message.startswith(f"--out {shared / f'disk-of-{rank}'}: not the same folder")
        assert "not visible to rank 1. Choose a folder on a file system" in message
    assert list((shared / "shared").iterdir()) == []  # nothing is left behind
