"""Several ranks on this machine, with gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.models import ROOT


def torchrun(module: str, *words: str | Path, ranks: int = 2, fails: bool = False) -> None:
    """Run a module of the tests on several ranks; all must succeed, unless one is to fail."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*start, "--nproc-per-node", str(ranks), "-m", module, *words],
        cwd=ROOT / "tests",
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode != 0) == fails, ended.stderr[-3000:]
