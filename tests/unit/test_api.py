"""`import leadout`: fast, complete, and its documented examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

import leadout
from leadout.errors import LeadoutError
from support.drafters import TINY_DRAFTER, write_random_drafter
from support.models import ROOT
from support.tiny_chat import write_tiny_chat_target

PAGE = ROOT / "docs" / "howto" / "python.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = write_tiny_chat_target(folder / "target")
    config = replace(TINY_DRAFTER, target_num_layers=6)
    return target, write_random_drafter(folder / "drafter", config)


def test_importing_loads_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, leadout\n"
        "print([m for m in ('torch', 'pydantic', 'transformers', 'vllm') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_every_name_is_there_before_and_after_its_package_was_imported() -> None:
    for name in leadout.__all__:
        assert getattr(leadout, name)
    for name, module in (("bench", "settings"), ("check", "run"), ("train", "config")):
        import_module(f"leadout.{name}.{module}")
        assert callable(getattr(leadout, name))
    with pytest.raises(AttributeError, match="no attribute 'fly'"):
        _ = leadout.fly  # type: ignore[attr-defined]


def test_there_are_examples_that_run() -> None:
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_page_run(
    example: str, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = pair
    code = example.replace("path/to/target", str(target)).replace("path/to/drafter", str(drafter))
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.strip()


def test_drafts_do_not_change_the_text(pair: tuple[Path, Path]) -> None:
    target, drafter = pair
    plain = leadout.generate(target, None, ["Hello", "And then?"], max_new_tokens=12)
    drafted = leadout.generate(target, drafter, ["Hello", "And then?"], max_new_tokens=12)
    assert [each.tokens for each in plain] == [each.tokens for each in drafted]
    assert plain[0].acceptance_length == 1.0


def test_wrong_settings_are_named() -> None:
    with pytest.raises(LeadoutError, match="--draft-tokens: got 0"):
        leadout.check("target", "drafter", draft_tokens=0)
    with pytest.raises(LeadoutError, match="--fast is not a setting of `leadout tune`"):
        leadout.tune("target", "drafter", fast=True)
    with pytest.raises(LeadoutError, match="--block-size: got 1"):
        leadout.train("target", "data", "out", block_size=1)
    with pytest.raises(LeadoutError, match="nowhere"), leadout.Server("nowhere"):
        pass
