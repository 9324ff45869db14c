"""Targets of other kinds than dense models go through `data`, `train`, `check` and `serve`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from openai import OpenAI

from leadout.checkpoints import read_checkpoint
from leadout.engine.child_process import EngineError
from leadout.engine.offline import SessionRequest, run_session
from leadout.engine.server import Server
from support.drafters import write_random_drafter
from support.processes import leadout
from support.tiny_chat import MASK_TOKEN
from support.tiny_targets import KINDS, NOT_SERVED, drafter_config, write_tiny_target

LENGTH, NEW_TOKENS = 160, 32
DATA = (
    *("--prompts", "self:48", "--dtype", "float32", "--concurrency", "16"),
    *("--greedy-share", "0.75"),
    *("--max-new-tokens", str(NEW_TOKENS), "--max-length", str(LENGTH)),
)
TRAIN = (
    *("--layers", "1", "--block-size", "4", "--anchors", "8", "--batch-sequences", "8"),
    *("--epochs", "3", "--learning-rate", "3e-3", "--max-length", str(LENGTH)),
    *("--precision", "float32", "--validation-sequences", "8", "--validate-every", "20"),
    *("--mask-token-id", str(MASK_TOKEN)),
)
CHECK = ("--texts", "2", "--dtype", "float32", "--long-context", "0")
SERVE = (
    *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4"),
    *("--max-model-len", "256", "--served-model-name", "tiny"),
)
VERDICTS = (0, 1, 3)


@pytest.mark.nightly  # each starts several engines
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_target_of_any_kind_gets_a_drafter(kind: str, tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target", kind)
    data, out = tmp_path / "data", tmp_path / "out"
    leadout("data", target, "--out", data, *DATA)
    trained = json.loads(leadout("train", target, "--data", data, "--out", out, *TRAIN, "--json"))
    # Acceptance in vLLM is that of validation, so training saw the states that vLLM computes.
    served, predicted = trained["served"]["served"], trained["served"]["predicted"]
    assert served > 1.05  # 1.0 without training; texts of random weights are hard to learn
    assert served == pytest.approx(predicted, rel=0.05)

    # A few texts leave the verdict open; what the engine computes is certain.
    drafter = out / "drafter"
    checked = json.loads(leadout("check", target, drafter, *CHECK, "--json", codes=VERDICTS))
    assert checked["parity"]["equal_drafts"] == checked["parity"]["drafts"] > 0
    assert checked["parity"]["first_difference"] is None
    assert checked["lossless"]["equal_texts"] == checked["lossless"]["texts"] > 0

    command = [sys.executable, "-m", "leadout", "serve", str(target), "--draft", str(drafter)]
    log = tmp_path / "server.log"
    with Server([*command, *SERVE], log=log) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=900)
        answer = client.completions.create(
            model="tiny", prompt=[5, 9, 2, 44, 7], max_tokens=16, temperature=0.0
        )
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 16


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "reason"), NOT_SERVED.items())
def test_vllm_still_refuses_these_kinds(kind: str, reason: str, tmp_path: Path) -> None:
    """The page on supported targets names them; this fails once vLLM serves one."""
    target = write_tiny_target(tmp_path / "target", kind)
    config = drafter_config(kind)
    drafter = write_random_drafter(tmp_path / "drafter", config)
    assert read_checkpoint(drafter).config == config
    request = SessionRequest(
        target=str(target),
        drafter=str(drafter),
        draft_tokens=config.max_draft_tokens,
        prompts={"some": [[5, 9, 2, 44, 7]]},
        max_tokens=8,
        max_length=64,
        dtype="float32",
    )
    with pytest.raises(EngineError, match=reason):
        run_session(request)
