"""Container files are sound, and install what the package's own metadata asks for."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from support.models import ROOT
from support.ops_files import OPS

FILES = sorted(OPS.glob("Containerfile*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    linted = subprocess.run(["hadolint", path], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_copied_and_installed_exists(path: Path) -> None:
    text = path.read_text()
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    (extras,) = re.findall(r'"\.\[([a-z,]+)\]"', text)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    # What the build backend reads must be copied: the readme and the licence.
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= set(text.split())


def test_the_image_has_the_vllm_that_the_package_asks_for() -> None:
    (wanted,) = PROJECT["optional-dependencies"]["vllm"]
    (tag,) = re.findall(r"vllm-openai:v([0-9.]+)", (OPS / "Containerfile").read_text())
    assert wanted.startswith(f"vllm>={tag.rpartition('.')[0]},")


def test_the_cpu_image_is_made_as_ci_makes_its_environment() -> None:
    recipe = (ROOT / ".ci" / "environment").read_text()
    image = (OPS / "Containerfile.cpu").read_text()
    for words in (r"torch==\S+", r"torchvision torchaudio torchcodec"):
        assert re.findall(words, recipe) == re.findall(words, image)
