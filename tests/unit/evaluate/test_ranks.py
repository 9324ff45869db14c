"""Two processes compute the same as one: gradients, validation, final weights and log.

With plain data parallelism, and with sharded weights (FSDP2).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from leadout.data.manifest import DataFolder
from leadout.evaluate.ranks import ALONE
from leadout.train.config import TrainConfig, TrainError
from leadout.train.progress import Record, read_log
from leadout.train.run import WORK, Run, complete_settings, read_corpus
from leadout.train.state import STATE, read_status
from support.models import TINY_VOCAB
from support.small_runs import KilledError, small_config
from support.torchrun import torchrun
from support.train_rank import BEFORE, FINAL, FIRST, VALIDATION, train_and_write

STEPS = 20


def config_of(optimizer: str, **changes: object) -> TrainConfig:
    # An odd batch, so that the ranks have different numbers of sequences, blocks and passes.
    return small_config(
        batch_sequences=5, epochs=2.0, states="disk", optimizer=optimizer, **changes
    )


CONFIGS = {
    "adamw": config_of("adamw"),
    "muon": config_of("muon"),
    "adamw-sharded": config_of("adamw", sharded=True, recompute=True, packing=True),
    "muon-sharded": config_of("muon", sharded=True),
}


# Whole runs with Muon; that its updates are those of one rank, test_optimizer.py shows.
IN_CI = ("adamw", "adamw-sharded")


@pytest.fixture(scope="module")
def names(nightly: bool) -> tuple[str, ...]:
    return tuple(CONFIGS) if nightly else IN_CI


@pytest.fixture(scope="module")
def by_two(
    target_folder: Path,
    data: DataFolder,
    names: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp("two")
    settings = {name: CONFIGS[name].model_dump(mode="json") for name in names}
    torchrun("support.train_rank", target_folder, data.folder, json.dumps(settings), out)
    return out


@pytest.fixture(scope="module")
def by_one(
    target_folder: Path,
    data: DataFolder,
    names: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp("one")
    for name in {"adamw", "muon"} & set(names):
        train_and_write(target_folder, data, CONFIGS[name], out / name, ALONE)
    return out


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in IN_CI else pytest.mark.nightly) for name in CONFIGS
    ],
)
def pair(request: pytest.FixtureRequest, by_one: Path, by_two: Path) -> tuple[Path, Path]:
    """The folders of a run on one rank and of the same run on two."""
    name = request.param
    return by_one / name.removesuffix("-sharded"), by_two / name


def test_gradients_are_equal(pair: tuple[Path, Path]) -> None:
    expected, found = (load_file(out / FIRST) for out in pair)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        largest = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, atol=1e-5 * largest, rtol=1e-5)


def test_validation_is_equal(pair: tuple[Path, Path]) -> None:
    one, two = pair
    assert (two / VALIDATION).read_text() == (one / VALIDATION).read_text()


def test_a_complete_run_is_equal(pair: tuple[Path, Path]) -> None:
    one, two = pair
    expected, found, before = (
        load_file(one / FINAL),
        load_file(two / FINAL),
        load_file(one / BEFORE),
    )
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-4, rtol=1e-3)
        moved = (weight - before[name]).norm()
        assert (found[name] - weight).norm() < 1e-3 * moved, name
    logs = [[(r.kind, r.step) for r in read_log(out / "run")] for out in pair]
    assert logs[0] == logs[1]
    losses = [[r.loss for r in read_log(out / "run") if r.kind == "step"] for out in pair]
    assert len(losses[0]) == STEPS
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_sharded_checkpoint_has_a_file_of_each_rank(by_two: Path, names: tuple[str, ...]) -> None:
    for name in names:
        run = by_two / name / "run"
        parts = sorted(path.name for path in run.glob("state*.safetensors"))
        if name.endswith("-sharded"):
            assert parts == [f"state-{STEPS}-1-of-2.safetensors", STATE]
        else:
            assert parts == [STATE]
        counts = []
        for part in parts:
            with safe_open(run / part, framework="pt") as opened:
                counts.append(opened.get_slice("weights.fc.weight").get_shape()[0])
        assert counts == ([32, 32] if len(parts) == 2 else [64])


def test_a_killed_run_continues_on_another_number_of_ranks(
    target_folder: Path, data: DataFolder, by_one: Path, tmp_path: Path
) -> None:
    """On one rank, on two with sharded weights, and on one again.

    SIGKILL leaves the last checkpoint; SIGTERM, of one rank only, lets all of them write one.
    """
    config, out = CONFIGS["adamw-sharded"], tmp_path / "run"
    corpus = read_corpus(data, target_folder, config, TINY_VOCAB)
    complete = complete_settings(config, target_folder, corpus, TINY_VOCAB)

    def dies(record: Record) -> None:
        if record.step == 5:
            raise KilledError

    with pytest.raises(KilledError):
        Run(target_folder, corpus, complete, out, ALONE).train(dies)
    folder = out / WORK
    assert saved_by(folder) == (4, [STATE])
    settings = json.dumps({"run": config.model_dump(mode="json")})
    words = ("support.train_rank", target_folder, data.folder, settings, tmp_path)
    torchrun(*words, "13", "SIGKILL", fails=True)
    assert saved_by(folder) == (12, ["state-12-1-of-2.safetensors", STATE])
    torchrun(*words, "17", "SIGTERM", fails=True)
    assert saved_by(folder) == (17, ["state-17-1-of-2.safetensors", STATE])
    (folder / "state-14-1-of-2.safetensors").write_bytes(b"of a checkpoint that was not finished")
    run = Run(target_folder, corpus, complete, out, ALONE)
    run.train(lambda _: None)
    assert saved_by(folder) == (STEPS, [STATE])
    for name, weight in load_file(by_one / "adamw" / FINAL).items():
        torch.testing.assert_close(run.weights.named()[name], weight, atol=1e-4, rtol=1e-3)
    steps = [record.step for record in read_log(folder) if record.kind == "step"]
    assert steps == list(range(1, STEPS + 1))


def saved_by(folder: Path) -> tuple[int, list[str]]:
    """The step of the last checkpoint, and its files."""
    status = read_status(folder)
    assert status is not None
    return status.step, sorted(path.name for path in folder.glob("state*.safetensors"))


def test_a_missing_part_of_a_checkpoint_is_named(
    by_two: Path, target_folder: Path, data: DataFolder, tmp_path: Path
) -> None:
    config = CONFIGS["adamw-sharded"]
    corpus = read_corpus(data, target_folder, config, TINY_VOCAB)
    complete = complete_settings(config, target_folder, corpus, TINY_VOCAB)
    run = Run(target_folder, corpus, complete, tmp_path, ALONE)
    run.folder.mkdir(exist_ok=True)
    (run.folder / STATE).write_bytes((by_two / "adamw-sharded" / "run" / STATE).read_bytes())
    with pytest.raises(TrainError, match=r"state-20-1-of-2.safetensors is missing: .* share"):
        run.train(lambda _: None)
