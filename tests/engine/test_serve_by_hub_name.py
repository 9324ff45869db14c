"""Names of a hub, against a local cache of it and without a network."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

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
    tiny_llama().save_pretrained(snapshot(hub, "Qwen/Qwen3-8B"))
    published = snapshot(hub, "z-lab/Qwen3-8B-DFlash-b16")
    write_checkpoint(published, random_drafter(CONFIG).state_dict(), CONFIG, "zlab")
    return home


LAST = ("--plan", "--dtype", "float32")


def run(hub: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )


PUBLISHED = ("Qwen/Qwen3-8B", "--draft", "auto")
PLANS = {
    "published": PUBLISHED,
    "pinned": (*PUBLISHED, "--speculative-config.revision", COMMIT),
    "gone": (*PUBLISHED, "--speculative-config.revision", "f" * 40),
    "auto": ("acme/tiny", "--draft", "auto"),
    "misspelt": ("acme/tiny", "--drafft", "acme/tiny-dflash"),
    "flags first": ("--max-model-len", "128", "acme/tiny"),
    "unknown": ("acme/nothing", "--draft", "acme/tiny-dflash"),
    "speculators": ("acme/tiny-speculator",),
}
ALL_OF_THEM = """
import json, sys
import vllm  # now: its log goes to where standard output is at this moment
from typer.testing import CliRunner
from leadout.cli.app import app

for name, words in json.loads(sys.argv[1]).items():
    ended = CliRunner().invoke(app, ["serve", *words])
    print("ENDED", json.dumps([name, ended.exit_code, ended.stdout, ended.stderr]))
"""


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def plans(hub: Path) -> dict[str, Ended]:
    """Several commands in one process: importing vLLM takes longer than all of them."""
    asked = {name: [*words, *LAST] for name, words in PLANS.items()}
    made = run(hub, "-c", ALL_OF_THEM, json.dumps(asked))
    assert made.returncode == 0, made.stderr
    lines = [line for line in made.stdout.splitlines() if line.startswith("ENDED ")]
    ended = [json.loads(line.removeprefix("ENDED ")) for line in lines]
    return {name: Ended(*rest) for name, *rest in ended}


def test_target_and_drafter_by_name(hub: Path) -> None:
    words = ("acme/tiny", "--draft", "acme/tiny-dflash", *LAST)
    made = run(hub, "-m", "leadout", "serve", *words)
    assert made.returncode == 0, made.stderr
    # The command alone is on standard output, ready to be copied.
    (line,) = made.stdout.splitlines()
    command = shlex.split(line)
    assert command[command.index("--model") + 1] == "acme/tiny"
    assert '"model": "acme/tiny-dflash", "num_speculative_tokens": 4' in line
    assert "leadout: K = 4" in made.stderr


def test_a_speculators_checkpoint_alone(plans: dict[str, Ended]) -> None:
    made = plans["speculators"]
    assert made.code == 0, made.stderr
    assert "--model acme/tiny " in made.stdout
    assert "target acme/tiny: named by the speculators checkpoint" in made.stderr


def test_auto_without_a_published_drafter_says_so(plans: dict[str, Ended]) -> None:
    made = plans["auto"]
    assert made.code == 2
    assert "no published drafter for acme/tiny" in made.stderr
    assert made.stdout == ""


def test_auto_gives_vllm_the_commit_that_was_examined(plans: dict[str, Ended]) -> None:
    made, pinned, gone = (plans[name] for name in ("published", "pinned", "gone"))
    assert made.code == 0, made.stderr
    assert f'"revision": "{COMMIT}"' in made.stdout
    assert f"--speculative-config.revision {COMMIT} to keep to this one" in made.stderr
    assert pinned.stdout == made.stdout
    assert gone.code == 2
    assert "z-lab/Qwen3-8B-DFlash-b16" in gone.stderr
    assert gone.stdout == ""


def test_a_misspelt_flag_is_refused(plans: dict[str, Ended]) -> None:
    made = plans["misspelt"]
    assert made.code == 2
    assert "--drafft is not a flag" in made.stderr
    assert "Did you mean --draft?" in made.stderr
    assert made.stdout == ""


def test_flags_before_the_target_are_refused(plans: dict[str, Ended]) -> None:
    made = plans["flags first"]
    assert made.code == 2
    assert "Expected the target before --max-model-len" in made.stderr


def test_an_unknown_name_is_refused(plans: dict[str, Ended]) -> None:
    made = plans["unknown"]
    assert made.code == 2
    assert "acme/nothing is neither a local folder" in made.stderr
