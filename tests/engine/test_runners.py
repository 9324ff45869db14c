"""Our drafter class under both of vLLM's model runners, and over two tensor-parallel workers.

With a reduced draft vocabulary as well, whose drafts are chosen without logits over the target's.
Engines with the V1 runner and one worker are in this process, the others in one of their own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leadout.checkpoints import load_drafter, write_checkpoint
from leadout.dflash.target import Target
from leadout.engine.inspection import read_steps
from leadout.engine.vllm_flags import LOCAL_ARGMAX
from leadout.pairing import read_target
from leadout.selftest.checks import compare_drafts
from support.drafters import TINY_DRAFTER, random_drafter, random_weights
from support.engine_drafts import reference_drafts
from support.faults import FAULTS
from support.models import ROOT, tiny_llama
from support.tiny_engine import PROMPTS, draft_on_v1, engine_arguments

K = TINY_DRAFTER.max_draft_tokens
CONFIG = replace(TINY_DRAFTER, target_num_layers=4)
# Not a multiple of 64: vLLM pads the head, and the second of two workers has all of the padding.
REDUCED = replace(CONFIG, own_head=True, draft_vocab_size=70)
WITHOUT_LOGITS = {LOCAL_ARGMAX: True}
RunEngine = Callable[..., Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    tiny_llama().save_pretrained(folder / "target")
    write_checkpoint(folder / "drafter", random_drafter(CONFIG).state_dict(), CONFIG, "zlab")
    return folder / "target", folder / "drafter"


def run(
    pair: tuple[Path, Path], *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "support.tiny_engine", *pair, str(K), *options],
        cwd=ROOT / "tests",
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment},
        capture_output=True,
        text=True,
    )


def result_of(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    for line in ended.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    raise AssertionError(ended.stdout[-3000:] + ended.stderr[-3000:])


def run_v1(run_engine: RunEngine, pair: tuple[Path, Path], **speculation: Any) -> dict[str, Any]:
    """As `run` and `result_of` without options, in this process."""
    target, drafter = pair
    with run_engine(target, **engine_arguments(drafter, K, speculation)) as llm:
        return draft_on_v1(llm)


@pytest.fixture(scope="module")
def on_v1(pair: tuple[Path, Path], run_engine: RunEngine) -> dict[str, Any]:
    return run_v1(run_engine, pair)


def test_v1_drafts_as_the_reference_does(pair: tuple[Path, Path], on_v1: dict[str, Any]) -> None:
    assert on_v1["drafter_class"] == "LeadoutDFlashForCausalLM"
    target, drafter = Target(tiny_llama(), CONFIG.target_layer_ids), load_drafter(pair[1])
    for prompt, answer, drafts in zip(PROMPTS, on_v1["answers"], on_v1["drafts"], strict=True):
        text = [*prompt, *answer]
        first = reference_drafts(target, drafter, text, [len(prompt) + 1], K)[0]
        assert tuple(drafts[0]) == first


def test_v2_runs_our_class_and_drafts_the_same(
    pair: tuple[Path, Path], on_v1: dict[str, Any], tmp_path: Path
) -> None:
    on_v2 = result_of(run(pair, "--v2", "--record", str(tmp_path)))
    assert on_v2["drafter_class"] == "LeadoutDFlashForCausalLM"
    assert on_v2["answers"] == on_v1["answers"]
    # V2 drafts once more after the last token of an answer.
    for mine, theirs in zip(on_v2["drafts"], on_v1["drafts"], strict=True):
        assert mine[: len(theirs)] == theirs
    # As `leadout selftest` compares them.
    texts = [read_steps(path) for path in sorted(tmp_path.iterdir())]
    found = compare_drafts(texts, pair[1], pair[0], "float32")
    assert found.equal == found.drafts == sum(K * len(drafts) for drafts in on_v2["drafts"])


@pytest.mark.nightly  # by the class that V1 has, too: test_refusals.py
@pytest.mark.parametrize("name", ["tap-beyond-target", "nan-weight"])
def test_v2_refuses_a_fault_at_the_start(
    pair: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    (fault,) = [fault for fault in FAULTS if fault.name == name]
    drafter = fault.make(pair[1], tmp_path / "faulty", read_target(pair[0]))
    ended = run((pair[0], drafter), "--v2")
    assert ended.returncode != 0
    expected = "target-layers: " if fault.rule == "target-layers" else "values that are NaN"
    assert expected in ended.stdout + ended.stderr


def test_two_tensor_parallel_workers_draft_the_same(
    pair: tuple[Path, Path], on_v1: dict[str, Any]
) -> None:
    parallel = result_of(run(pair, "--tensor-parallel", "2", VLLM_CPU_OMP_THREADS_BIND="0|1"))
    assert parallel == on_v1


@pytest.fixture(scope="module")
def reduced(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("reduced") / "drafter"
    weights = {**random_weights(REDUCED), **random_drafter(CONFIG).state_dict()}
    write_checkpoint(folder, weights, REDUCED, "speculators", target_name=str(pair[0]))
    return pair[0], folder


@pytest.fixture(scope="module")
def with_logits(reduced: tuple[Path, Path], run_engine: RunEngine) -> dict[str, Any]:
    return run_v1(run_engine, reduced)


@pytest.mark.parametrize("where", ["V1", "V2", "two workers"])
def test_drafts_are_the_same_without_logits_over_the_targets_vocabulary(
    reduced: tuple[Path, Path], with_logits: dict[str, Any], run_engine: RunEngine, where: str
) -> None:
    if where == "V1":
        chosen = run_v1(run_engine, reduced, **WITHOUT_LOGITS)
    else:
        options = {"V2": ["--v2"], "two workers": ["--tensor-parallel", "2"]}[where]
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if where == "two workers" else {}
        speculation = ("--speculation", json.dumps(WITHOUT_LOGITS))
        chosen = result_of(run(reduced, *options, *speculation, **environment))
    assert chosen["drafter_class"] == "LeadoutDFlashForCausalLM"
    assert chosen["answers"] == with_logits["answers"]
    drafted = set()
    # V2 drafts once more after the last token of an answer.
    for mine, theirs in zip(chosen["drafts"], with_logits["drafts"], strict=True):
        assert mine[: len(theirs)] == theirs
        drafted |= {token for block in theirs for token in block}
    assert len(drafted) > 5
    assert all(token % 4 == 0 and token // 4 < 70 for token in drafted)  # as random_weights has it
