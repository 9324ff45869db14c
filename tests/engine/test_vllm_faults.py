"""The faults on docs/vllm-faults.md are in the vLLM that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.models import ROOT

SCRIPTS = sorted((ROOT / "docs" / "upstream").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_vllm_has_the_fault(script: Path) -> None:
    """When this fails with "fixed", vLLM has fixed it: correct the page and docs/limits.md."""
    environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "CRITICAL"}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "docs" / "vllm-faults.md").read_text()
    assert f"](upstream/{script.name})" in page
    assert done.stdout in page  # as printed
