"""The import rules hold, and break when they are broken."""

import shutil
import subprocess
from pathlib import Path

import pytest

from support.models import ROOT


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run the import rules of pyproject.toml on the package `tree`/leadout."""
    return subprocess.run(
        ["lint-imports", "--config", ROOT / "pyproject.toml", "--no-cache"],
        cwd=tree,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def copied_tree(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src", tmp_path / "src")
    return tmp_path / "src"


def test_the_package_keeps_its_layers(copied_tree: Path) -> None:
    result = lint(copied_tree)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "line", "broken_rule"),
    [
        ("cli/commands.py", "import vllm", "Only the engine package imports vLLM"),
        (
            "cli/commands.py",
            "def hidden():\n    from vllm.config import VllmConfig",
            "Only the engine package imports vLLM",
        ),
        ("environment.py", "import vllm.envs", "Only the engine package imports vLLM"),
        ("dflash/config.py", "import transformers", "The algorithm needs torch only"),
        ("dflash/config.py", "import leadout.engine.vllm_adapter", "Layers import downwards only"),
        ("engine/guard.py", "import leadout.cli.commands", "Layers import downwards only"),
        ("control/gain.py", "import torch", "The policy needs neither torch nor an engine"),
        ("attic.py", "x = 1", "Layers import downwards only"),
    ],
)
def test_a_forbidden_import_is_caught(
    copied_tree: Path, module: str, line: str, broken_rule: str
) -> None:
    with (copied_tree / "leadout" / module).open("a") as source:
        source.write(f"\n{line}\n")
    result = lint(copied_tree)
    assert result.returncode != 0
    assert f"{broken_rule} BROKEN" in result.stdout
