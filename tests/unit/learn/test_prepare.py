"""A cycle trains with the drafter's own shape and settings."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leadout.checkpoints import load_weights, read_checkpoint, write_checkpoint
from leadout.evaluate.target_weights import HEAD
from leadout.learn import work_folder
from leadout.learn.config import CycleSettings, LearnConfig, LearnError
from leadout.learn.prepare import base_settings, first_settings, require_learnable
from leadout.learn.work_folder import WorkFolder
from leadout.settings import SettingsError
from leadout.train.export import SETTINGS
from leadout.train.init import reduce_draft_vocab
from support.drafters import random_weights
from support.learn_world import World
from support.models import TINY_VOCAB


def test_training_uses_the_drafters_own_shape_and_settings(world: World) -> None:
    checkpoint = read_checkpoint(world.drafter)
    settings = base_settings(checkpoint, CycleSettings(), 128, seed=3)
    assert settings.block_size == checkpoint.config.block_size == 5
    assert settings.target_layer_ids == checkpoint.config.target_layer_ids
    assert settings.initial == str(world.drafter)
    assert settings.anchors == 12  # of its training.yaml
    assert settings.learning_rate == pytest.approx(2.5e-3)
    assert (settings.max_length, settings.precision, settings.seed) == (128, "float32", 3)
    faster = base_settings(checkpoint, CycleSettings(learning_rate=0.1), 128, seed=3)
    assert faster.learning_rate == 0.1


def test_cycles_have_no_shorter_first_blocks(world: World, tmp_path: Path) -> None:
    drafter = shutil.copytree(world.drafter, tmp_path / "drafter")
    with (drafter / SETTINGS).open("a") as file:
        file.write("first_block_size: 3\n")
    checkpoint = read_checkpoint(drafter)
    assert first_settings(drafter).first_block_size == 3
    assert base_settings(checkpoint, CycleSettings(), 128, seed=3).first_block_size is None


def test_a_reduced_vocabulary_can_learn_if_its_rows_are_the_targets(
    world: World, tmp_path: Path
) -> None:
    require_learnable(read_checkpoint(world.drafter), world.target)
    answers = [sample.response for sample in world.data.samples()]
    reduced, _ = reduce_draft_vocab(world.drafter, tmp_path / "reduced", world.target, answers, 30)
    require_learnable(reduced, world.target)
    for changed in ("one value", "the mapping"):
        weights = load_weights(reduced)
        if changed == "one value":
            weights[HEAD][7, 3] += 0.001
        else:
            unused = set(range(TINY_VOCAB)) - {int(i) for i in weights["d2t"] + torch.arange(30)}
            weights["d2t"][29] = max(unused) - 29
        folder = tmp_path / changed
        write_checkpoint(folder, weights, reduced.config, "speculators", target_name="tiny")
        with pytest.raises(LearnError, match=r"1 of 30 rows are not the target's.*--draft-vocab"):
            require_learnable(read_checkpoint(folder), world.target)


@pytest.mark.parametrize(("own", "reason"), [("embedding", "embedding"), ("head", "whole vocab")])
def test_a_drafter_with_an_embedding_or_a_whole_head_of_its_own_cannot_learn(
    world: World, tmp_path: Path, own: str, reason: str
) -> None:
    config = replace(read_checkpoint(world.drafter).config, **{f"own_{own}": True})
    weights = random_weights(config)
    write_checkpoint(tmp_path / "own", weights, config, "speculators", target_name="tiny")
    with pytest.raises(LearnError, match=reason):
        require_learnable(read_checkpoint(tmp_path / "own"), world.target)


def test_two_budgets_are_an_error() -> None:
    with pytest.raises(SettingsError, match="--minutes and --tokens are two budgets"):
        LearnConfig.resolve({"registry": "r", "minutes": 1.0, "tokens": 5})
    with pytest.raises(SettingsError, match="--held-out: got 2"):
        LearnConfig.resolve({"registry": "r", "held_out": 2.0, "tokens": None})


def test_settings_of_earlier_files_are_readable() -> None:
    """The minimum number of requests had another name."""
    recorded = CycleSettings(min_requests=20).model_dump(mode="json")
    recorded["least_requests"] = recorded.pop("min_requests")
    assert CycleSettings.model_validate(recorded) == CycleSettings(min_requests=20)


def test_the_recorded_settings_have_no_folders(tmp_path: Path) -> None:
    config = LearnConfig(registry=tmp_path, gain=0.1)
    assert config.cycle == CycleSettings(gain=0.1)
    assert set(config.cycle.model_dump()) == set(CycleSettings.model_fields)
    assert config.work_folder == tmp_path / "work"


def test_a_work_folder_is_for_one_cycle_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_folder, "MAX_REMOVER_SECONDS", 0.1)
    work = WorkFolder(tmp_path / "work")
    with work.locked():
        assert (tmp_path / "work").stat().st_mode & 0o777 == 0o700
        with (
            pytest.raises(LearnError, match="in use by another cycle"),
            WorkFolder(tmp_path / "work").locked(),
        ):
            pass
    with work.locked():
        pass
