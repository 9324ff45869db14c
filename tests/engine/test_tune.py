"""A real calibration of a tiny pair on two servers, and an engine that drafts by the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leadout.console import Progress
from leadout.control.tuned_file import Model, Tuned, read_tuned, write_tuned
from leadout.engine.calibration import CalibrationResult
from leadout.engine.serve_plan import make_plan
from leadout.engine.settings import (
    CALIBRATION,
    SCHEDULER,
    CalibrationSettings,
    ServeSettings,
    with_section,
)
from leadout.engine.step_records import RecordedSteps, RoundTag, round_option, server_config
from leadout.engine.vllm_flags import vllm_config_of
from leadout.models import fingerprint
from leadout.tune.run import Subject, measure, prepare, summarize
from leadout.tune.settings import TuneError, TuneSettings
from support.drafters import TINY_DRAFTER, write_random_drafter
from support.gpu_resolution import run_on_fake_gpu
from support.tiny_chat import MASK_TOKEN, write_tiny_chat_target

MAX_K, MAX_BATCH, TOKENS = TINY_DRAFTER.max_draft_tokens, 2, 16
DRAFTS = range(MAX_K + 1)
# A request of a round must go on while a busy machine polls late: at 1 ms per step, for 16 s.
LENGTH = 16384
SIZES = ("--max-model-len", str(LENGTH), "--max-num-seqs", "8")
FLAGS = ("--dtype", "float32", "--enforce-eager", *SIZES)
TABLE = [(1, 1, 3), (2, 2, 1), (3, 16, 0)]
METRIC = "vllm:spec_decode_num_"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    config = replace(
        TINY_DRAFTER, target_num_layers=6, mask_token_id=MASK_TOKEN, max_positions=LENGTH
    )
    target = write_tiny_chat_target(folder / "target")
    file = target / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "max_position_embeddings": LENGTH}))
    return target, write_random_drafter(folder / "drafter", config)


@pytest.fixture(scope="module")
def measured(pair: tuple[Path, Path]) -> CalibrationResult:
    """What `leadout tune` measures, with fewer rounds and tokens."""
    target, drafter = map(str, pair)
    settings = TuneSettings(
        target=target, drafter=drafter, max_batch=MAX_BATCH, turns="slices", server_flags=FLAGS
    )
    ready = prepare(settings)
    rounds = ready.rounds[: 2 * len(DRAFTS)]  # each K once at each batch size
    # Servers run as users run them.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        found = measure(replace(ready, rounds=rounds), FLAGS, Progress.silent(), TOKENS)
    assert not ready.folder.exists()
    return found


@pytest.fixture(scope="module")
def tuned(pair: tuple[Path, Path], measured: CalibrationResult) -> Tuned:
    target, drafter = (Model(name=str(path), fingerprint=fingerprint(path)) for path in pair)
    return summarize(measured, Subject(target, drafter, MAX_K + 1, FLAGS))


def test_a_batch_size_that_was_never_whole_is_left_out(
    pair: tuple[Path, Path], measured: CalibrationResult, caplog: pytest.LogCaptureFixture
) -> None:
    target, drafter = (Model(name=str(path), fingerprint=fingerprint(path)) for path in pair)
    subject = Subject(target, drafter, MAX_K + 1, FLAGS)
    never = [
        each.model_copy(update={"batch": 8, "turns": []})
        for each in measured.rounds
        if each.batch == MAX_BATCH
    ]
    found = summarize(measured.model_copy(update={"rounds": [*measured.rounds, *never]}), subject)
    assert sorted(found.verify) == [1, 2]
    assert found.max_batch == MAX_BATCH
    assert "never decoded 8 requests at a time" in caplog.text
    with pytest.raises(TuneError, match="never decoded a full batch"):
        summarize(measured.model_copy(update={"rounds": never}), subject)


def test_the_servers_are_those_of_the_flags(
    pair: tuple[Path, Path], measured: CalibrationResult
) -> None:
    served = vllm_config_of(str(pair[0]), FLAGS)
    for facts in (measured.bare, measured.drafting):
        assert facts.config == server_config(served)
        assert (facts.runner, facts.dtype) == ("V1", "float32")


def test_steps_verify_and_draft_the_k_of_their_round(measured: CalibrationResult) -> None:
    assert {(each.batch, each.k) for each in measured.rounds} == {
        (batch, k) for batch in (1, 2) for k in DRAFTS
    }
    for each in measured.rounds:
        steps = [step for turn in each.turns for step in turn.steps]
        assert {step.verified for step in steps} <= {0, each.k}
        assert {step.drafted for step in steps} <= {0, each.k}
        diagonal = [step for step in steps if step.verified == step.drafted == each.k]
        assert len(diagonal) > len(steps) / 3
        assert all(step.seconds > 0 for step in steps)
        assert all(len(turn.bare) >= 3 for turn in each.turns)
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
    assert (tuned.flags, tuned.turns) == (list(FLAGS), "slices")
    # The upper bounds: a busy machine hides what a draft of so small a model costs.
    assert all(tuned.draft[batch][MAX_K].high > 0 for batch in (1, 2))


def test_steps_are_recorded_a_step_ahead_of_the_model(
    pair: tuple[Path, Path], run_engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a CPU vLLM always schedules in step; what a GPU does is pinned here for once."""
    from vllm import SamplingParams
    from vllm.platforms.cpu import CpuPlatform

    usual = CpuPlatform.check_and_update_config

    def keep_ahead(vllm_config: Any) -> None:
        usual(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keep_ahead))
    calibration = CalibrationSettings(folder=tmp_path, max_batch=MAX_BATCH)
    speculation = {"method": "dflash", "model": str(pair[1]), "num_speculative_tokens": MAX_K}
    with run_engine(
        pair[0],
        max_model_len=256,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        speculative_config=speculation,
        scheduler_cls=SCHEDULER,
        additional_config=with_section({}, CALIBRATION, calibration),
    ) as llm:
        asks = [
            SamplingParams(
                temperature=0.0,
                max_tokens=20,
                ignore_eos=True,
                detokenize=False,
                extra_args=round_option(RoundTag(7, place, 2)),
            )
            for place in range(2)
        ]
        prompts = [{"prompt_token_ids": [5 + place, 9, 2, 44]} for place in range(2)]
        llm.generate(prompts, asks, use_tqdm=False)
    recorded = RecordedSteps(tmp_path)
    assert recorded.facts().config.async_scheduling
    steps = recorded.new()
    assert (steps[0].prompt_tokens, steps[0].decoded, steps[0].round) == (8, [], 7)
    decoding = [step for step in steps[1:] if len(step.decoded) == 2]
    # Four steps with K = 2, then one with none, each verified by the step after it.
    assert [step.drafted for step in steps[:10]] == [2, 2, 2, 2, 0] * 2
    assert [step.decoded[0][1] for step in decoding[:9]] == [2, 2, 2, 2, 0, 2, 2, 2, 2]
    assert all(step.seconds is not None and step.seconds > 0 for step in steps)
    assert sum(tokens for step in steps for place, _, tokens in step.decoded if place == 0) >= 19


@pytest.mark.parametrize(
    "flags", [pytest.param((), marks=pytest.mark.nightly), ("--tensor-parallel-size", "4")]
)
def test_on_a_gpu_the_measured_server_has_the_graphs_of_the_served_one(
    flags: tuple[str, ...],
) -> None:
    max_batch = 64  # with K = 15 more tokens than vLLM captures by default
    rows = run_on_fake_gpu("support.tune_resolution", "H100", str(max_batch), *flags)
    bare, drafting, live = rows["bare"], rows["drafting"], rows["live"]
    for row in (bare, drafting):
        assert row["sections"] == ["calibration"]
        assert row["runner"] == "V2"
        assert row["async_scheduling"]
        assert row["cudagraph_mode"] == live["cudagraph_mode"] == "FULL_AND_PIECEWISE"
        assert row["max_num_seqs"] == live["max_num_seqs"]
        assert row["tensor_parallel_size"] == (4 if flags else 1)
    assert drafting["full_graphs"].keys() == live["full_graphs"].keys()  # every K of the ladder
    assert min(drafting["full_graphs"].values()) >= max_batch
    assert min(live["full_graphs"].values()) < max_batch


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
