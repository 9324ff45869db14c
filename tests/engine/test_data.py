"""`leadout data` with a real engine: same answers in one run, in two parts, or after a kill."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from leadout.cli.app import app
from leadout.data.chat import Chat
from leadout.data.manifest import DataFolder, shard_path
from leadout.dflash.target import UnsupportedTargetError
from leadout.engine.child_process import EngineError
from leadout.engine.offline import TextEngine, TextRequest, require_tappable
from support.prompts import PROMPTS
from support.tiny_chat import END_OF_TEXT, END_OF_TURN, write_tiny_chat_target

NEW_TOKENS, LENGTH, AT_ONCE = 32, 300, 4
SELF = 8
FLAGS = (
    *("--max-new-tokens", str(NEW_TOKENS), "--max-length", str(LENGTH)),
    *("--concurrency", str(AT_ONCE), "--dtype", "float32", "--prompts", f"self:{SELF}"),
    *("--greedy-share", "0.5", "--temperature", "0.7", "--top-p", "1"),
)
Run = Callable[..., DataFolder]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "asked.jsonl"
    rows = [
        {"turns": [f"{number}. {PROMPTS[number % 8]}", "And then?"][: 1 + number % 2]}
        for number in range(32)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def engine(target: Path) -> Iterator[TextEngine]:
    engine = TextEngine(
        str(target),
        max_length=LENGTH,
        max_requests=AT_ONCE,
        dtype="float32",
        max_num_batched_tokens=LENGTH,  # so that not every prompt fits into the step it comes in
    )
    yield engine
    engine._llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def run(target: Path, asked: Path, folder: Path, engine: TextEngine) -> Iterator[Run]:
    """Runs the command in this process; all runs share one engine."""

    def shared(model: str, *, max_length: int, max_requests: int, **_: Any) -> TextEngine:
        assert (model, max_length, max_requests) == (str(target), LENGTH, AT_ONCE)
        return engine

    def run(out: str, *flags: str) -> DataFolder:
        words = ["data", str(target), "--prompts", str(asked), "--out", str(folder / out)]
        ended = CliRunner().invoke(app, [*words, *FLAGS, *flags])
        assert ended.exit_code == 0, ended.output
        return DataFolder(folder / out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leadout.engine.offline.TextEngine", shared)
        yield run


@pytest.fixture(scope="module")
def whole(run: Run) -> DataFolder:
    return run("whole")


def test_every_prompt_is_answered_by_the_target(whole: DataFolder, target: Path) -> None:
    samples = list(whole.samples())
    assert len(samples) == 32 + 16 + SELF
    assert whole.manifests[0].complete
    assert whole.manifests[0].counts["self"].samples == SELF
    assert {sample.temperature for sample in samples} == {0.0, 0.7}
    for sample in samples:
        stopped = sample.response[-1] in (END_OF_TURN, END_OF_TEXT)
        assert stopped or len(sample.response) == NEW_TOKENS
        assert not {END_OF_TURN, END_OF_TEXT} & set(sample.response[:-1])
    assert any(len(sample.response) < NEW_TOKENS for sample in samples)
    chat = Chat(target)
    first, second = (next(s for s in samples if s.id == f"asked/1#0/{turn}") for turn in range(2))
    turns = [f"1. {PROMPTS[1]}", "And then?"]
    assert second.prompt == chat.prompt(turns, [chat.text(first.response)])
    own_turns = {tuple(sample.prompt) for sample in samples if sample.source == "self"}
    assert len(own_turns) == SELF


def test_greedy_answers_are_the_models_argmax(whole: DataFolder, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    greedy = [sample for sample in whole.samples() if sample.temperature == 0.0][:6]
    for sample in greedy:
        text = torch.tensor([sample.prompt + sample.response])
        with torch.no_grad():
            best = model(text).logits[0, len(sample.prompt) - 1 : -1].argmax(-1)
        assert best.tolist() == sample.response


def test_two_parts_have_the_samples_of_one_run(run: Run, whole: DataFolder) -> None:
    run("parts", "--shard", "2/2")
    parts = run("parts", "--shard", "1/2")
    assert list(parts.samples()) == list(whole.samples())


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_killed_run_resumes_to_the_samples_of_one_run(
    run: Run, whole: DataFolder, target: Path, asked: Path, folder: Path
) -> None:
    out = folder / "killed"
    shard = shard_path(out, 1, 1)
    words = [sys.executable, "-m", "leadout", "data", target, "--prompts", asked, "--out", out]
    with (folder / "killed.log").open("wb") as log:
        process = subprocess.Popen([*words, *FLAGS], stdout=log, stderr=log)
    try:
        while process.poll() is None and lines_of(shard) < 9:
            time.sleep(0.01)
    finally:
        process.kill()
    assert process.wait() == -9, (folder / "killed.log").read_text()
    left = shard.read_bytes()
    assert 9 <= lines_of(shard) < len(whole.samples())

    resumed = run("killed", "--resume")
    assert shard.read_bytes().startswith(left[: left.rfind(b"\n") + 1])
    assert list(resumed.samples()) == list(whole.samples())
    assert resumed.content_hash() == whole.content_hash()
    assert resumed.manifests == whole.manifests


def test_answers_come_in_the_order_of_the_requests(engine: TextEngine, whole: DataFolder) -> None:
    samples = sorted(whole.samples(), key=lambda s: (len(s.response), s.id))
    greedy = [sample for sample in samples if sample.temperature == 0.0]
    asks = [TextRequest(sample.id, sample.prompt, NEW_TOKENS) for sample in reversed(greedy)]
    answers = engine.complete(asks)
    assert [answer.tokens for answer in answers] == [s.response for s in reversed(greedy)]
    assert {answer.finish for answer in answers} == {"stop", "length"}
    assert engine.running == 0


def test_sampled_prompts_larger_than_a_step_together_are_answered(engine: TextEngine) -> None:
    prompts = [[3 + number] * (2 * LENGTH // 3) for number in range(AT_ONCE)]
    asks = [
        TextRequest(f"long {number}", prompt, max_tokens=4, temperature=1.0, seed=number)
        for number, prompt in enumerate(prompts)
    ]
    together = engine.complete(asks)
    engine.reset_prefix_cache()
    alone = [engine.complete([ask])[0] for ask in asks]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]


def test_an_engine_that_refuses_its_settings_says_why(target: Path) -> None:
    with pytest.raises(EngineError, match=r"does not start with.* 9999 tokens.*max_model_len"):
        TextEngine(str(target), max_length=9999, max_requests=4, dtype="float32")


@pytest.mark.parametrize(
    ("architecture", "refused"),
    [("MixtralForCausalLM", True), ("LlamaForCausalLM", False), ("UnknownForCausalLM", False)],
)
def test_targets_whose_states_vllm_does_not_hand_out_are_refused(
    architecture: str, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    if not refused:
        require_tappable(str(tmp_path))
        return
    with pytest.raises(UnsupportedTargetError, match="add `-- --model-impl transformers`"):
        require_tappable(str(tmp_path))
