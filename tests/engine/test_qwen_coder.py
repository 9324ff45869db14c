"""A second real target: Qwen2.5-Coder-1.5B-Instruct, with a vocabulary of 152k tokens.

A few short texts go through `data`, `train`, `convert --draft-vocab` and `check`. The weights in
float32 need 7 GB of memory twice, so this runs nightly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leadout.checkpoints import read_checkpoint
from leadout.data.manifest import DataFolder
from leadout.pairing import read_target
from support.models import cached_qwen_coder
from support.processes import leadout
from support.prompts import PROMPTS

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(7200)]

VOCABULARY = 151_936
LENGTH, NEW_TOKENS, DRAFTED = 128, 24, 48
DATA = (
    *("--dtype", "float32", "--concurrency", "8", "--greedy-share", "1"),
    *("--max-new-tokens", str(NEW_TOKENS), "--max-length", str(LENGTH)),
)
TRAIN = (
    *("--layers", "1", "--block-size", "4", "--anchors", "8", "--batch-sequences", "4"),
    *("--epochs", "2", "--max-length", str(LENGTH), "--precision", "float32"),
    *("--validation-sequences", "2", "--validate-every", "50"),
)
CHECK = ("--texts", "1", "--dtype", "float32", "--long-context", "0")


@pytest.fixture(scope="module")
def target() -> Path:
    return cached_qwen_coder()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS))
    return path


@pytest.fixture(scope="module")
def data(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    folder = tmp_path_factory.mktemp("data")
    leadout("data", target, "--prompts", prompts, "--out", folder, *DATA)
    return DataFolder(folder)


@pytest.fixture(scope="module")
def out(target: Path, data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "out"
    leadout("train", target, "--data", data.folder, "--out", folder, *TRAIN)
    return folder


def test_a_short_run_trains_a_drafter_that_vllm_serves(target: Path, out: Path) -> None:
    record = json.loads((out / "drafter" / "training.json").read_text())
    served = record["served"]
    assert served["served_steps"] > 0
    assert 1 <= served["served"] <= 4
    config = read_checkpoint(out / "drafter").config
    facts = read_target(target)
    assert config.vocab_size == facts.vocab_size == VOCABULARY
    assert config.rope == facts.rope
    # A special token that the chat template does not use, so no token of a text is taken.
    assert config.mask_token_id > 151_645


def test_vllm_computes_the_drafts_of_the_reference_with_a_small_draft_vocabulary(
    target: Path, data: DataFolder, out: Path, prompts: Path, tmp_path: Path
) -> None:
    reduced = tmp_path / "reduced"
    words = ("--target", target, "--draft-vocab", DRAFTED, "--frequent-in", data.folder)
    said = leadout("convert", out / "drafter", reduced, "--to", "speculators", *words)
    assert f"{DRAFTED} tokens can be drafted" in said
    assert read_checkpoint(reduced).config.head_rows == DRAFTED

    asked = ("--prompts", prompts, *CHECK, "--json")
    found: Any = json.loads(leadout("check", target, reduced, *asked, codes=(0, 1, 3)))
    # States, drafter and drafts, against transformers and the reference.
    assert found["parity"]["equal_drafts"] == found["parity"]["drafts"] > 0
    assert found["parity"]["first_difference"] is None
    assert found["lossless"]["equal_texts"] == found["lossless"]["texts"] > 0
