"""Names of a hub, against a local cache of it and without a network."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from leadout.checkpoints import convert, write_checkpoint
from support.drafters import TINY_DRAFTER, random_drafter
from support.models import tiny_llama

CONFIG = replace(TINY_DRAFTER, target_num_layers=4)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def snapshot(hub: Path, name: str) -> Path:
    """An empty snapshot folder for a model of the hub, as its cache lays it out."""
    model = hub / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    (model / "snapshots").mkdir()
    return model / "snapshots" / COMMIT


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    hub = home / "hub"
    tiny_llama().save_pretrained(snapshot(hub, "acme/tiny"))
    drafter = snapshot(hub, "acme/tiny-dflash")
    write_checkpoint(drafter, random_drafter(CONFIG).state_dict(), CONFIG, "zlab")
    speculators = snapshot(hub, "acme/tiny-speculator")
    convert(drafter, speculators, "speculators", "acme/tiny")
    return home


def plan(hub: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "leadout", "serve", *arguments, "--plan", "--dtype", "float32"],
        env={**os.environ, "HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )


def test_target_and_drafter_by_name(hub: Path) -> None:
    made = plan(hub, "acme/tiny", "--draft", "acme/tiny-dflash")
    assert made.returncode == 0, made.stderr
    # The command alone is on standard output, ready to be copied.
    (line,) = made.stdout.splitlines()
    command = shlex.split(line)
    assert command[command.index("--model") + 1] == "acme/tiny"
    assert '"model": "acme/tiny-dflash", "num_speculative_tokens": 4' in line
    assert "leadout: K = 4" in made.stderr


def test_a_speculators_checkpoint_alone(hub: Path) -> None:
    made = plan(hub, "acme/tiny-speculator")
    assert made.returncode == 0, made.stderr
    assert "--model acme/tiny " in made.stdout
    assert "target acme/tiny: named by the speculators checkpoint" in made.stderr


def test_auto_without_a_published_drafter_says_so(hub: Path) -> None:
    made = plan(hub, "acme/tiny", "--draft", "auto")
    assert made.returncode == 2
    assert "no published drafter for acme/tiny" in made.stderr
    assert made.stdout == ""


def test_a_misspelt_flag_is_refused(hub: Path) -> None:
    made = plan(hub, "acme/tiny", "--drafft", "acme/tiny-dflash")
    assert made.returncode == 2
    assert "--drafft is not a flag" in made.stderr
    assert "Did you mean --draft?" in made.stderr
    assert made.stdout == ""


def test_flags_before_the_target_are_refused(hub: Path) -> None:
    made = plan(hub, "--max-model-len", "128", "acme/tiny")
    assert made.returncode == 2
    assert "Expected the target before --max-model-len" in made.stderr


def test_an_unknown_name_is_refused(hub: Path) -> None:
    made = plan(hub, "acme/nothing", "--draft", "acme/tiny-dflash")
    assert made.returncode == 2
    assert "acme/nothing is neither a local folder" in made.stderr
