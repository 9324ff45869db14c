"""Flags override the file, the file overrides defaults, and errors say where the value is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leadout.errors import LeadoutError
from leadout.settings import SettingsError
from leadout.train.config import TrainConfig


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("layers: 3\nlearning_rate: 1e-4\ntarget_layer_ids: [1, 5]\n")
    found = TrainConfig.resolve({"layers": 2, "block_size": None, "seed": 0}, file)
    assert found.layers == 2
    assert found.learning_rate == 1e-4
    assert found.target_layer_ids == (1, 5)
    assert found.block_size == TrainConfig().block_size
    assert TrainConfig.resolve({}, None) == TrainConfig()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    config = TrainConfig(target_layer_ids=(1, 2), patience=3, states="disk", warmup=0.0)
    config.write(tmp_path / "training.yaml")
    assert TrainConfig.resolve({}, tmp_path / "training.yaml") == config
    text = (tmp_path / "training.yaml").read_text()
    assert text.startswith("layers: null\nmlp_width: null\ndraft_vocab: null\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"block_size": 1}, "--block-size: got 1; input should be greater than or equal to 2"),
        ({"learning_rate": 0.0}, "--learning-rate: got 0.0; input should be greater than 0"),
        ({"target_layer_ids": ["x"]}, "--target-layer-ids: got x; input should be a valid int"),
    ],
)
def test_errors_name_the_flag(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        TrainConfig.resolve(flags)
    assert str(caught.value).startswith(message)


def test_first_blocks_must_be_shorter() -> None:
    assert TrainConfig.resolve({"first_block_size": 5}).first_block_size == 5
    with pytest.raises(SettingsError, match="--first-block-size 8 must be below --block-size 8"):
        TrainConfig.resolve({"first_block_size": 8})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers: 0", "layers: got 0; input should be greater than or equal to 1"),
        ("layer: 2", "layer is not a setting of"),
        ("optimizer: sgd", "optimizer: got sgd; input should be 'muon' or 'adamw'"),
        ("target_layer_ids: [1, one]", "target_layer_ids: got one"),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        TrainConfig.resolve({}, file)
    assert str(caught.value).startswith(f"{file}: {message}")


def test_a_flag_overrides_an_invalid_key(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("layers: 0")
    assert TrainConfig.resolve({"layers": 1}, file).layers == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n- 2\n", "expected one `name: value` per line"),
        ("a: [", "is not valid YAML"),
        (None, "does not exist"),
    ],
)
def test_files_without_settings_are_rejected(
    tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / "settings.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(LeadoutError, match=message):
        TrainConfig.resolve({}, file)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert TrainConfig.resolve({}, tmp_path / "empty.yaml") == TrainConfig()
