"""The JAX model of tpu-inference reads our drafters and drafts what the reference drafts.

On a CPU, in an environment of its own, with the attention kernel's reference implementation in the
place of the kernel: docs/howto/tpus.md says what that proves.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tpu_drafts
from leadout.checkpoints.widen import widen_heads
from support.models import ROOT
from support.shipped_drafter import SHIPPED

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of the other environment, made once and kept outside the tree."""
    if named := os.environ.get("LEADOUT_TPU_PYTHON"):
        return Path(named)
    if shutil.which("python3.12") is None:
        pytest.skip("jax of this version of tpu-inference needs python3.12, which is not installed")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "leadout"
    folder = cache / "tpu"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "tpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run(["bash", ROOT / ".ci" / "tpu-environment", folder], check=True)
            (folder / "complete").touch()
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def arms(smollm2: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    wide = tmp_path_factory.mktemp("wide") / "drafter"
    widen_heads(SHIPPED, wide, "zlab", 128)
    overrides = tpu_drafts.rope_overrides(SHIPPED)
    arms = {
        "stock": tpu_drafts.Arm(SHIPPED, {}),
        "shipped": tpu_drafts.Arm(SHIPPED, overrides),
        "wide": tpu_drafts.Arm(wide, overrides),
    }
    return tpu_drafts.compare(smollm2, arms, python)


def test_the_jax_model_drafts_what_the_reference_drafts(arms: Any) -> None:
    shipped = arms["shipped"]
    exact = shipped["by_dtype"]["float32"]
    assert exact["equal_drafts"] == shipped["drafts"]
    assert exact["largest_logit_error"] < 1e-3
    # As it is served there, drafts differ only where the reference has nearly a tie.
    rounded = shipped["by_dtype"]["bfloat16"]
    assert rounded["equal_drafts"] >= 0.95 * shipped["drafts"]
    assert rounded["largest_gap_of_a_different_draft"] < 0.2


def test_without_overrides_positions_are_wrong(arms: Any) -> None:
    """Fails once tpu-inference reads them right: then the page needs no overrides any more."""
    stock = arms["stock"]
    assert stock["jax"]["rope_theta"] != stock["rope_theta"]
    assert stock["by_dtype"]["float32"]["equal_drafts"] < stock["drafts"]


def test_the_kernel_refuses_small_heads_and_takes_wide_ones(arms: Any) -> None:
    """Fails once the kernel takes them: then the page needs no conversion any more."""
    assert "head_dim==64" in arms["shipped"]["jax"]["kernel"]
    assert arms["wide"]["jax"]["kernel"].startswith("not refused")


def test_wide_heads_draft_the_same(arms: Any) -> None:
    wide = arms["wide"]
    assert wide["head_dim"] == 128
    exact = wide["by_dtype"]["float32"]
    assert exact["equal_drafts"] >= 0.95 * wide["drafts"]  # the norms' weights were rounded
    assert exact["largest_gap_of_a_different_draft"] < 0.1
