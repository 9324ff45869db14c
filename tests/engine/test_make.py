"""`leadout make` from a target to a result, with an interruption, in engines as users start them.

The target is SmolLM2 with its first layers only, so that engines and steps are quick; with
--nightly all of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from leadout.checkpoints import read_checkpoint
from leadout.control.tuned_file import read_tuned
from leadout.errors import INTERRUPTED, NEGATIVE, SUCCESS, UNDECIDED
from leadout.make.result import MakeResult
from leadout.make.state import MakeState

LAYERS = 5
STAGES = ["costs", "data", "train", "check", "tune"]
CONFIG = """\
block_size: 3
layers: 1
validation_sequences: 8
anchors: 16
batch_sequences: 8
candidates: 4096
draft_vocab: 16
learning_rate: 0.004
"""
WORDS = (
    *("--tokens", "16000", "--quick", "--max-batch", "2", "--dtype", "float32"),
    *("--max-new-tokens", "40", "--max-length", "160"),
)
START_SECONDS = 1800  # until training begins, also on a busy machine


@pytest.fixture(scope="module")
def target(smollm2: Path, nightly: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    shutil.copytree(smollm2, folder)
    if nightly:
        return folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    (path,) = folder.glob("*.safetensors")
    layer = re.compile(r"model\.layers\.(\d+)\.")
    kept = {
        name: tensor
        for name, tensor in load_file(path).items()
        if (found := layer.match(name)) is None or int(found[1]) < LAYERS
    }
    save_file(kept, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made") / "out"


@pytest.fixture(scope="module")
def words(target: Path, out: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    config = tmp_path_factory.mktemp("config") / "train.yaml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "leadout", "make", str(target), "--out", str(out)]
    # Whether it pays is not the question here: so small a drafter may not.
    return [*command, *WORDS, "--train-config", str(config), "--anyway", "--json"]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    usual = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    del usual["VLLM_ENABLE_V1_MULTIPROCESSING"]  # users have not set it
    return usual


@pytest.fixture(scope="module")
def interrupted(words: list[str], out: Path, environment: dict[str, str]) -> MakeState:
    """What Ctrl-C leaves behind after training has begun."""
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    with process.stderr as lines:
        deadline = time.monotonic() + START_SECONDS
        shown = []
        for line in lines:
            shown.append(line)
            assert time.monotonic() < deadline, shown
            if "3/5 training: " in line:
                process.send_signal(signal.SIGINT)
                break
        shown += lines.readlines()
    assert process.wait() == INTERRUPTED, "".join(shown)[-4000:]
    assert "Run the same command again to continue." in shown[-1]
    state = MakeState.read(out)
    assert state is not None
    return state


@pytest.fixture(scope="module")
def made(interrupted: MakeState, words: list[str], environment: dict[str, str]) -> MakeResult:
    ended = subprocess.run(words, env=environment, capture_output=True, text=True)
    codes = (SUCCESS, NEGATIVE, UNDECIDED)
    assert ended.returncode in codes, ended.stderr[-4000:]
    result = MakeResult.model_validate_json(ended.stdout)
    assert ended.returncode == result.exit_code
    assert "1/5 costs of drafting: done before" in ended.stderr
    assert "2/5 training text: done before" in ended.stderr
    return result


def test_an_interruption_keeps_the_stages_before(interrupted: MakeState, out: Path) -> None:
    assert list(interrupted.stages) == STAGES[:2]
    assert interrupted.plan is not None
    assert interrupted.plan.speed.measured
    assert not (out / "drafter").exists()


def test_the_same_command_continues_to_the_end(
    made: MakeResult, interrupted: MakeState, out: Path
) -> None:
    state = MakeState.read(out)
    assert state is not None
    assert list(state.stages) == STAGES
    for name in ("costs", "data"):
        assert state.stages[name] == interrupted.stages[name]
    assert state.seconds["train"] > interrupted.seconds["train"]


def test_costs_were_measured_before_anything_else(made: MakeResult, out: Path) -> None:
    costs = read_tuned(out / "costs" / "tuned.json")
    assert set(costs.verify) == {1, 2}
    assert costs.acceptance.tokens[2].value < 1.2  # random weights
    assert made.expectation is not None
    assert [load.concurrency for load in made.expectation.loads] == [1, 2]
    assert made.expectation.loads[0].break_even > 1
    assert not (out / "costs" / "drafter").exists()


def test_the_folder_has_drafter_tuned_file_check_and_report(made: MakeResult, out: Path) -> None:
    config = read_checkpoint(out / "drafter").config
    assert (config.block_size, config.draft_vocab_size) == (3, 16)
    tuned = read_tuned(out / "tuned.json")
    tuned.require_pair(Path(made.target), out / "drafter")
    check: Any = json.loads((out / "check.json").read_text())
    assert check["pays"] is not None
    report = (out / "report.html").read_text()
    assert made.outcome in report
    assert made.acceptance_length is not None
    assert made.acceptance_length.value >= 1


def test_vllm_accepts_what_validation_predicts(made: MakeResult, out: Path) -> None:
    """Otherwise training fails; but only if there is something to accept."""
    record = json.loads((out / "drafter" / "training.json").read_text())
    served = record["served"]
    assert served["served_steps"] > 100
    assert served["served"] > 1.3
    assert abs(served["served"] - served["predicted"]) <= 0.05 * served["served"]
    assert served["served_by_position"] == sorted(served["served_by_position"], reverse=True)
    assert f"{served['served']:.2f}" in (out / "drafter" / "README.md").read_text()


def test_the_serve_line_starts_what_was_measured(made: MakeResult, out: Path) -> None:
    plan = subprocess.run(
        [sys.executable, "-m", *made.serve.split(), "--plan"], capture_output=True, text=True
    )
    assert plan.returncode == SUCCESS, plan.stderr
    drafts = read_tuned(out / "tuned.json").max_drafts
    assert ("--speculative-config" in plan.stdout + plan.stderr) == (drafts > 0)
    assert "--dtype float32" in plan.stdout + plan.stderr
