"""A check in vLLM: equal drafts and texts of a healthy pair, and a real engine fault named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from leadout.check import lossless, parity, prefix_cache
from leadout.check.run import EngineRuns, run_engines
from leadout.engine.draft_recorder import read_texts
from leadout.engine.offline import Recording, SessionRequest, run_session
from leadout.engine.plugin import SWITCH
from leadout.evaluate.hidden_states import load_model
from support.drafters import TINY_DRAFTER, write_random_drafter
from support.tiny_chat import MASK_TOKEN, write_tiny_chat_target

K = TINY_DRAFTER.max_draft_tokens
PROMPTS = {
    "some": [[5, 9, 2, 44, 7, 7, 31, 200, 13], [60, 61, 62, 30]],
    "more": [list(range(100, 140))],
    # Of three cache blocks on a CPU.
    "cached": [[(place * step) % 250 for place in range(400)] for step in (3, 7, 11)],
}
CONTEXTS = {"near": [list(range(20, 60))], "far": [[place % 200 for place in range(450)]]}
TOKENS, LENGTH = 24, 500


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    config = replace(TINY_DRAFTER, target_num_layers=6, mask_token_id=MASK_TOKEN)
    target = write_tiny_chat_target(folder / "target")
    return target, write_random_drafter(folder / "drafter", config)


@pytest.fixture(scope="module")
def model(pair: tuple[Path, Path]) -> nn.Module:
    return load_model(pair[0], torch.float32)


@pytest.fixture(scope="module")
def reports() -> list[str]:
    return []


@pytest.fixture(scope="module")
def runs(pair: tuple[Path, Path], reports: list[str]) -> EngineRuns:
    return run_engines(
        *pair,
        PROMPTS,
        max_tokens=TOKENS,
        draft_tokens=K,
        max_length=LENGTH,
        dtype=torch.float32,
        contexts=CONTEXTS,
        report=reports.append,
    )


def test_the_engine_computes_the_drafts_of_the_reference(
    pair: tuple[Path, Path], model: nn.Module, runs: EngineRuns
) -> None:
    found = parity.compare(*pair, model, runs.recorded, torch.float32, torch.float32)
    assert found.blocks == 4 * 3
    assert found.drafts == found.equal_drafts == 12 * K
    assert found.first_difference is None
    assert 0 < max(found.differences.values()) < 1e-5
    assert parity.finding_of(found) is None
    # Every token before the last anchor was recorded, so everything was compared.
    for text in runs.recorded:
        assert text.context.positions.tolist() == list(range(int(text.blocks[-1].anchor)))


def test_speculation_does_not_change_the_text(model: nn.Module, runs: EngineRuns) -> None:
    assert [len(answers) for answers in runs.bare.values()] == [2, 1, 3]
    found = lossless.compare_answers(
        model, PROMPTS, runs.bare, runs.speculative, torch.float32, K + 1
    )
    assert (found.texts, found.equal_texts) == (6, 6)
    assert lossless.finding_of(found) is None


def test_acceptance_is_counted_by_set(runs: EngineRuns, reports: list[str]) -> None:
    (greedy,) = runs.served  # on CPUs nothing is drafted beside a sampled request
    assert greedy.temperature == 0.0
    assert list(greedy.by_set) == list(PROMPTS)
    assert len(greedy.by_position) == K
    # Every text has one token of the prefill, and one or more of every step.
    written = sum(len(answer) - 1 for each in runs.speculative.values() for answer in each)
    assert 0 < greedy.steps <= written <= greedy.steps * greedy.length + K * 6
    assert reports[0] == "with drafter: vLLM has started"
    assert "with drafter: more (greedy)" in reports
    assert "with drafter: cached (warm prefix cache)" in reports
    assert "with drafter: more (warm prefix cache)" not in reports  # shorter than a cache block
    assert reports[-1] == "without drafter: cached (greedy)"


def test_the_prefix_cache_was_warm(runs: EngineRuns) -> None:
    found = runs.cached
    assert (found.texts, found.other_texts) == (3, 3)
    assert 3 * 128 <= found.cached_tokens < found.prompt_tokens == 3 * 400
    # In float32 a cached context leads to the same drafts.
    assert found.cold == found.warm >= 1
    assert prefix_cache.finding_of(found) is None


def test_contexts_are_served_with_the_drafter_only(runs: EngineRuns) -> None:
    assert [run.prompt_set for run in runs.in_contexts] == list(CONTEXTS)
    assert not runs.bare.keys() & CONTEXTS.keys()
    for run in runs.in_contexts:
        (steps,), (answer,) = run.by_step, run.answers
        assert steps[0] == 1  # of the prompt
        assert sum(steps) == len(answer) == TOKENS
        assert all(1 <= count <= K + 1 for count in steps)


def test_the_fault_of_vllms_own_class_on_cpus_is_named(
    pair: tuple[Path, Path],
    model: nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It normalises the context keys of every layer with the norm of the first layer.
    monkeypatch.setenv(SWITCH, "0")
    target, drafter = pair
    path = tmp_path / "drafts.safetensors"
    request = SessionRequest(
        target=str(target),
        drafter=str(drafter),
        draft_tokens=K,
        prompts={},
        max_tokens=TOKENS,
        max_length=LENGTH,
        dtype="float32",
        recording=Recording(prompts=PROMPTS["some"], blocks=3, path=path),
    )
    run_session(request, lambda _: None)
    found = parity.compare(target, drafter, model, read_texts(path), torch.float32, torch.float32)
    assert found.first_difference == "layer 1 context keys"
    assert found.differences["layer 1 context keys"] > 0.05
    finding = parity.finding_of(found)
    assert finding is not None
    assert "layer 1 context keys" in finding.message
