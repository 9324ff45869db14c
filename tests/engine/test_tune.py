"""A real calibration of a tiny pair, and an engine that drafts as the table says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leadout.control.tuned_file import Model, Tuned, read_tuned, write_tuned
from leadout.engine.calibration import CalibrationRequest, CalibrationResult, calibrate
from leadout.engine.serve_plan import make_plan
from leadout.engine.settings import ServeSettings
from leadout.models import fingerprint
from leadout.tune.run import Subject, prepare, summarize
from leadout.tune.settings import TuneSettings
from support.drafters import TINY_DRAFTER, write_random_drafter
from support.tiny_chat import MASK_TOKEN, write_tiny_chat_target

MAX_K, MAX_BATCH, TOKENS = TINY_DRAFTER.max_draft_tokens, 2, 16
TABLE = [(1, 1, 3), (2, 2, 1), (3, 16, 0)]
METRIC = "vllm:spec_decode_num_"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    config = replace(TINY_DRAFTER, target_num_layers=6, mask_token_id=MASK_TOKEN)
    target = write_tiny_chat_target(folder / "target")
    return target, write_random_drafter(folder / "drafter", config)


@pytest.fixture(scope="module")
def measured(pair: tuple[Path, Path]) -> CalibrationResult:
    """What `leadout tune` measures, with fewer tokens."""
    target, drafter = map(str, pair)
    ready = prepare(
        TuneSettings(target=target, drafter=drafter, max_batch=MAX_BATCH, dtype="float32")
    )
    rounds = ready.rounds[: 2 * (MAX_K + 1)]  # each K once at each batch size
    heard: list[str] = []
    result = calibrate(
        CalibrationRequest(
            target=target,
            drafter=drafter,
            draft_tokens=MAX_K,
            prompts=ready.prompts,
            rounds=rounds,
            tokens=TOKENS,
            max_length=ready.max_length,
            dtype="float32",
        ),
        heard.append,
    )
    assert len(heard) == 2 + len(rounds)
    return result


@pytest.fixture(scope="module")
def tuned(pair: tuple[Path, Path], measured: CalibrationResult) -> Tuned:
    target, drafter = (Model(name=str(path), fingerprint=fingerprint(path)) for path in pair)
    return summarize(measured, Subject(target, drafter, MAX_K + 1))


def test_steps_verify_and_draft_the_k_of_their_round(measured: CalibrationResult) -> None:
    assert {(each.batch, each.k) for each in measured.rounds} == {
        (batch, k) for batch in (1, 2) for k in range(MAX_K + 1)
    }
    for each in measured.rounds:
        steps = [step for turn in each.turns for step in turn.steps]
        assert {step.verified for step in steps} <= {0, each.k}
        assert {step.drafted for step in steps} <= {0, each.k}
        diagonal = [step for step in steps if step.verified == step.drafted == each.k]
        assert len(diagonal) > len(steps) / 3
        assert all(step.seconds > 0 for step in steps)
        assert all(len(turn.bare) == 3 for turn in each.turns)
        assert sum(step.tokens for step in each.prefill_bare) > 0
        assert sum(step.tokens for step in each.prefill_drafting) > 0


def test_every_request_generates_the_same_tokens(measured: CalibrationResult) -> None:
    for each in measured.rounds:
        wanted = TOKENS if each.k else TOKENS // 2
        assert len(each.gained) == each.batch
        for gained in each.gained:
            assert wanted <= sum(gained.tokens) <= wanted + each.k
            assert 1 <= min(gained.tokens) <= max(gained.tokens) <= each.k + 1


def test_a_random_drafter_does_not_pay(tuned: Tuned) -> None:
    # Its drafts are accepted by chance only, and each costs a part of a step.
    assert tuned.acceptance.tokens[MAX_K].value < 1.3
    assert tuned.table == [(1, MAX_BATCH, 0)]
    assert (tuned.runner, tuned.dtype) == ("V1", "float32")
    assert all(tuned.draft[batch][MAX_K].value > 0 for batch in (1, 2))


def test_an_engine_with_the_table_drafts_by_batch_size(
    pair: tuple[Path, Path], tuned: Tuned, tmp_path: Path
) -> None:
    from vllm import LLM

    path = tmp_path / "tuned.json"
    write_tuned(tuned.model_copy(update={"table": TABLE, "max_batch": 16}), path)
    assert read_tuned(path).k_at(2) == 1
    flags = ("--max-model-len", "256", "--max-num-seqs", "16", "--dtype", "float32")
    plan = make_plan(
        ServeSettings(target=str(pair[0]), draft=str(pair[1]), vllm_flags=flags, tuned=path)
    )
    speculation = json.loads(plan.command[plan.command.index("--speculative-config") + 1])
    llm = LLM(
        model=str(pair[0]),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=16,
        skip_tokenizer_init=True,
        speculative_config=speculation,
        disable_log_stats=False,
    )
    try:
        assert [drafted_per_step(llm, batch) for batch in (1, 2, 3)] == [3.0, 1.0, None]
    finally:
        llm.llm_engine.engine_core.shutdown()


def drafted_per_step(llm: Any, batch: int) -> float | None:
    """By vLLM's counters, which are the process's: hence the difference."""
    from vllm import SamplingParams

    before = counters(llm)
    prompts = [{"prompt_token_ids": [5 + number, 9, 2, 44]} for number in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)
    steps, tokens = (new - old for new, old in zip(counters(llm), before, strict=True))
    return tokens / steps if steps else None


def counters(llm: Any) -> tuple[int, int]:
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return found.get(f"{METRIC}drafts", 0), found.get(f"{METRIC}draft_tokens", 0)
