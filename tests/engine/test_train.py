"""From prompts to a served drafter: `leadout data`, `leadout train`, and vLLM's own counters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from leadout.checkpoints import load_drafter, read_checkpoint, write_checkpoint
from leadout.data.manifest import DataFolder
from leadout.engine.offline import SessionRequest, run_session
from leadout.train.init import new_drafter
from support.processes import leadout
from support.tiny_chat import MASK_TOKEN
from support.tiny_data import write_predictable_target

# In CI test_make.py trains with the same commands, and looks at the same record.
pytestmark = pytest.mark.nightly

# Own prompts of a random target are as good as any: no dataset is needed.
PROMPTS, NEW_TOKENS, LENGTH = 160, 64, 256
DATA = (
    *("--prompts", f"self:{PROMPTS}", "--greedy-share", "0.75", "--dtype", "float32"),
    *("--max-new-tokens", str(NEW_TOKENS), "--max-length", str(LENGTH), "--concurrency", "64"),
)
TRAIN = (
    *("--layers", "1", "--block-size", "5", "--anchors", "32", "--batch-sequences", "16"),
    *("--epochs", "8", "--learning-rate", "5e-3", "--max-length", str(LENGTH)),
    *("--precision", "float32", "--validation-sequences", "16", "--validate-every", "50"),
    *("--mask-token-id", str(MASK_TOKEN)),
)
MARGIN = 0.3  # tokens a step, above an untrained drafter


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_predictable_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    folder = tmp_path_factory.mktemp("data")
    leadout("data", target, "--out", folder, *DATA)
    return DataFolder(folder)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out") / "run"


@pytest.fixture(scope="module")
def report(target: Path, data: DataFolder, out: Path) -> Any:
    words = ("train", target, "--data", data.folder, "--out", out, *TRAIN, "--json")
    return json.loads(leadout(*words))


def test_training_raises_the_acceptance_that_vllm_serves(
    report: Any, out: Path, target: Path, data: DataFolder, tmp_path: Path
) -> None:
    config = read_checkpoint(out / "drafter").config
    untrained = new_drafter(config, seed=0)
    write_checkpoint(tmp_path / "untrained", untrained.state_dict(), config, "zlab")
    prompts = [sample.prompt for sample in data.samples()][:16]
    (before,) = run_session(
        SessionRequest(
            target=str(target),
            drafter=str(tmp_path / "untrained"),
            draft_tokens=config.max_draft_tokens,
            prompts={"held out": prompts},
            max_tokens=NEW_TOKENS,
            max_length=LENGTH,
            dtype="float32",
        )
    ).runs
    assert before.steps > 500
    assert report["served"]["served_steps"] > 300
    assert report["served"]["served"] >= before.acceptance_length + MARGIN
    assert report["validation"]["overall"]["acceptance_length"] >= 1 + MARGIN


def test_vllm_accepts_what_validation_predicts(report: Any) -> None:
    served, predicted = report["served"]["served"], report["served"]["predicted"]
    assert abs(served - predicted) <= 0.05 * served
    by_position = report["served"]["served_by_position"]
    assert by_position == sorted(by_position, reverse=True)
    assert served == pytest.approx(1 + sum(by_position))


def test_the_drafter_says_what_it_was_made_from(report: Any, out: Path, data: DataFolder) -> None:
    folder = out / "drafter"
    assert load_drafter(folder, torch.float32).config.mask_token_id == MASK_TOKEN
    record = json.loads((folder / "training.json").read_text())
    without_folders = {name: Path(report[name]).name for name in ("target", "drafter")}
    assert record == {**report, **without_folders}
    assert report["data_hash"] == data.content_hash()
    assert f"{report['served']['served']:.2f}" in (folder / "README.md").read_text()


def test_two_processes_train_and_serve_a_drafter_for_speculators(
    target: Path, data: DataFolder, tmp_path: Path
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = ["train", target, "--data", data.folder, "--out", tmp_path / "out", *TRAIN]
    last = ["--epochs", "0.5", "--format", "speculators", "--json"]
    ended = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "-m", "leadout", *words, *last],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    by_two = json.loads(ended.stdout)  # one report, of the leading rank
    assert by_two["served"]["served_steps"] > 300
    assert read_checkpoint(tmp_path / "out" / "drafter").format == "speculators"
