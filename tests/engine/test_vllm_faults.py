"""The faults on docs/vllm-faults.md are in the vLLM that is installed."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from support.models import ROOT

SCRIPTS = sorted((ROOT / "docs" / "upstream").glob("*.py"))
WITH_ENGINE = [script for script in SCRIPTS if "LLM(" in script.read_text()]
WITHOUT_ENGINE = [script for script in SCRIPTS if script not in WITH_ENGINE]


def require_on_page(script: Path, printed: str) -> None:
    page = (ROOT / "docs" / "vllm-faults.md").read_text()
    assert f"](upstream/{script.name})" in page
    assert printed in page


# When one of these fails with "fixed", vLLM has fixed it: correct the page and docs/limits.md.


@pytest.mark.parametrize("script", WITH_ENGINE, ids=lambda script: script.stem)
def test_vllm_has_the_fault(script: Path) -> None:
    environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "CRITICAL"}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    require_on_page(script, done.stdout)


@pytest.mark.parametrize("script", WITHOUT_ENGINE, ids=lambda script: script.stem)
def test_a_function_of_vllm_has_the_fault(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, where vLLM is imported once for all of them."""
    import vllm  # noqa: F401  # whatever its import prints is not the script's

    capsys.readouterr()
    runpy.run_path(str(script))  # ends with SystemExit("fixed") if it is
    require_on_page(script, capsys.readouterr().out)
