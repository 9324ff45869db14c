"""Every setting of a training run is a flag of `leadout train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from leadout.cli.app import app
from leadout.train.config import TrainConfig

REQUIRED = ["train", "some/target", "--data", "d", "--out", "o"]


def flags() -> dict[str, Any]:
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    context = typer.Context(command)
    return {option: each for each in command.get_params(context) for option in each.opts}


def test_every_setting_is_a_flag_with_its_help() -> None:
    for name, field in TrainConfig.model_fields.items():
        flag = flags()[f"--{name.replace('_', '-')}"]
        assert flag.default is None, name  # the default is the model's
        assert flag.help.startswith(field.description), name
        if field.default not in (None, False, ()):
            assert f"[default: {field.default}]" in flag.help


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of `train` and `plan` in place of their work."""
    calls: list[Any] = []

    def record(*arguments: Any, **options: Any) -> None:
        calls.append((arguments, options))

    monkeypatch.setattr("leadout.train.command.train", record)
    monkeypatch.setattr("leadout.train.command.plan", record)
    return calls


def run(*words: str) -> Any:
    return CliRunner().invoke(app, [*REQUIRED, *words])


def test_without_flags_all_settings_are_defaults(given: list[Any]) -> None:
    assert run().exit_code == 0
    ((arguments, options),) = given
    assert arguments == ("some/target", Path("d"), Path("o"), TrainConfig())
    assert options == {"to": None, "resume": False, "trackers": (), "vllm_flags": []}


def test_flags_of_every_type_are_passed_on(given: list[Any]) -> None:
    ended = run(
        *("--layers", "2", "--learning-rate", "0.5", "--optimizer", "adamw", "--compile"),
        *("--target-layer-ids", "1", "--target-layer-ids", "7", "--format", "speculators"),
        *(
            "--resume",
            "--tracker",
            "wandb",
            "--tracker",
            "mlflow",
            "--states-from",
            "http://a:1",
            "--states-from",
            "http://b:2",
        ),
        *("--", "--tensor-parallel-size", "2"),
    )
    assert ended.exit_code == 0, ended.output
    ((arguments, options),) = given
    assert arguments[-1] == TrainConfig(
        layers=2,
        learning_rate=0.5,
        optimizer="adamw",
        compile=True,
        target_layer_ids=(1, 7),
        states_from=("http://a:1", "http://b:2"),
    )
    vllm_flags = options.pop("vllm_flags")
    assert vllm_flags == ["--tensor-parallel-size", "2"]
    assert options == {"to": "speculators", "resume": True, "trackers": ["wandb", "mlflow"]}


def test_a_plan_needs_no_folder_to_write(given: list[Any]) -> None:
    assert run("--plan", "--layers", "3").exit_code == 0
    assert given == [(("some/target", Path("d"), TrainConfig(layers=3), []), {})]


def test_flags_override_the_file(given: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("compile: true\nlayers: 4\nseed: 9\n")
    assert run("--config", str(file), "--no-compile", "--layers", "3").exit_code == 0
    assert given[0][0][-1] == TrainConfig(compile=False, layers=3, seed=9)


def test_a_resumed_run_takes_its_settings_from_the_folder(given: list[Any], tmp_path: Path) -> None:
    TrainConfig(layers=7, seed=3).write(tmp_path / "training.yaml")
    words = ["train", "t", "--data", "d", "--out", str(tmp_path), "--resume", "--save-every", "9"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert given[0][0][-1] == TrainConfig(layers=7, seed=3, save_every=9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--block-size", "1"), "error: --block-size: got 1"),
        (("--optimizer", "sgd"), "'sgd' is not one of"),
        (("--config", "nowhere.yaml"), "error: nowhere.yaml does not exist"),
    ],
)
def test_a_wrong_flag_exits_with_2(words: tuple[str, ...], message: str) -> None:
    ended = run(*words)
    assert ended.exit_code == 2
    assert message in ended.output
