"""Sizes and times by arithmetic, with made-up speeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leadout.control.tuned_file import PrefillLaw
from leadout.make import plan
from leadout.make.plan import (
    ANSWER_TOKENS,
    CONCURRENCY,
    DATA_SHARE,
    MIN_PROMPTS,
    PASSES,
    PREFILL_TOKENS,
    PROMPT_TOKENS,
    MakePlan,
    Speed,
    Subject,
    estimated_speed,
    make_plan,
    measured_speed,
    measured_times,
    training_gain,
)
from leadout.make.settings import MakeError, MakeSettings
from leadout.pairing import TargetSizes
from leadout.pairing.sizes import Experts
from leadout.tune.plan import START_SECONDS, ProductTimes
from support.tuned_files import a_tuning

SIZES = TargetSizes(
    hidden_size=576,
    num_layers=30,
    vocab_size=49152,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    mlp_width=1536,
    tied=True,
)
TIMES = ProductTimes(one=0.005, per_token=0.0001)
FREE = ProductTimes(one=0.0, per_token=0.0)
SPEED = Speed(
    measured=True,
    answer_tokens_per_second=400.0,
    session_tokens_per_second=150.0,
    operations_per_second=100e9,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(16 << 20))
    return tmp_path


def planned(
    folder: Path, spent: float | None = None, speed: Speed = SPEED, **given: Any
) -> MakePlan:
    settings = MakeSettings(target="t", out=folder / "out", **given)
    subject = Subject(folder, SIZES, settings.training())
    return make_plan(settings, subject, speed, TIMES, spent)


def minutes_of(plan: MakePlan) -> dict[str, float]:
    return {stage.name: stage.minutes for stage in plan.stages}


def test_an_hour_is_shared_between_all_stages(folder: Path) -> None:
    plan = planned(folder)
    assert plan.minutes == pytest.approx(60, abs=2)
    assert plan.train_minutes is not None
    assert plan.train_tokens is None
    data, training = minutes_of(plan)["data"] - START_SECONDS / 60, plan.train_minutes
    assert data / (data + training) == pytest.approx(DATA_SHARE, abs=0.01)
    # What the target writes in that time, prompts included.
    assert plan.samples == pytest.approx(
        data * 60 * 400 / (ANSWER_TOKENS + PROMPT_TOKENS), rel=0.01
    )
    assert plan.sources == [f"self:{plan.samples}"]
    assert plan.limit is None
    assert (plan.layers, plan.block_size) == (2, 8)


def test_more_hours_are_more_text_and_more_training(folder: Path) -> None:
    short, long = planned(folder), planned(folder, hours=4)
    assert short.train_minutes is not None
    assert long.train_minutes is not None
    assert long.train_minutes > 4 * short.train_minutes  # measurements take no longer
    assert long.samples > 4 * short.samples
    assert long.blocks > 4 * short.blocks
    assert long.high >= short.high
    for name in ("costs", "check", "tune"):
        assert minutes_of(long)[name] == minutes_of(short)[name]


def test_a_slow_first_stage_leaves_less(folder: Path) -> None:
    usual, late = planned(folder), planned(folder, spent=1800.0)
    assert usual.train_minutes is not None
    assert late.train_minutes is not None
    assert late.train_minutes < usual.train_minutes - 0.6 * 25
    assert late.samples < usual.samples


def test_a_budget_that_turned_out_too_small_is_exceeded(folder: Path) -> None:
    late = planned(folder, spent=3600.0)
    assert late.train_minutes == 1
    assert minutes_of(late)["data"] < 2
    assert minutes_of(late)["check"] == minutes_of(planned(folder))["check"]


def test_tokens_are_passes_over_the_data(folder: Path) -> None:
    plan = planned(folder, tokens=600_000)
    assert plan.train_minutes is None
    assert plan.train_tokens == 600_000
    assert plan.samples == 600_000 / PASSES / ANSWER_TOKENS
    assert plan.answer_tokens == 200_000
    anchors = plan.blocks / (600_000 / ANSWER_TOKENS)
    assert anchors == int(anchors) >= 16
    assert planned(folder, tokens=10).samples == MIN_PROMPTS


def test_answers_are_no_longer_than_allowed(folder: Path) -> None:
    plan = planned(folder, tokens=600_000, max_new_tokens=50)
    assert plan.answer_tokens == 200_000
    assert plan.samples == 4 * planned(folder, tokens=600_000).samples


def test_own_prompts_are_limited_to_what_the_budget_allows(folder: Path) -> None:
    plan = planned(folder, prompts=("a.jsonl", "b.jsonl"))
    assert plan.sources == ["a.jsonl", "b.jsonl"]
    assert plan.limit == -(-plan.samples // 2)


def test_quick_measurements_take_less(folder: Path) -> None:
    usual, quick = minutes_of(planned(folder)), minutes_of(planned(folder, quick=True))
    starts = 2 * START_SECONDS / 60
    assert quick["tune"] - starts < (usual["tune"] - starts) / 4
    assert quick["check"] < usual["check"]
    assert quick["costs"] == usual["costs"]


def test_too_little_time_is_refused_with_what_would_do(folder: Path) -> None:
    with pytest.raises(
        MakeError, match=r"--hours 0.05 is too little.*at least --hours (\S+),"
    ) as e:
        planned(folder, hours=0.05)
    enough = float(str(e.value).partition("at least --hours ")[2].partition(",")[0])
    assert planned(folder, hours=enough).train_minutes
    assert "--quick" in str(e.value)


def test_speeds_from_the_size_of_the_target(folder: Path) -> None:
    settings = MakeSettings(target="t", out=folder / "out")
    subject = Subject(folder, SIZES, settings.training())
    speed = estimated_speed(subject, TIMES)
    assert not speed.measured
    step = TIMES.forward_seconds(16 << 20, CONCURRENCY)
    assert speed.answer_tokens_per_second == pytest.approx(CONCURRENCY / step)
    faster = estimated_speed(subject, ProductTimes(0.0025, 0.00005))
    assert faster.operations_per_second == pytest.approx(2 * speed.operations_per_second)
    training = estimated_speed(subject, TIMES, gain=3.0)
    assert training.operations_per_second == pytest.approx(3 * speed.operations_per_second)
    assert training.answer_tokens_per_second == speed.answer_tokens_per_second
    parallel = estimated_speed(subject, TIMES, devices=4)
    assert parallel.answer_tokens_per_second == pytest.approx(4 * speed.answer_tokens_per_second)
    assert parallel.session_tokens_per_second == pytest.approx(4 * speed.session_tokens_per_second)
    assert parallel.operations_per_second == speed.operations_per_second  # of one trainer


def test_speeds_and_times_from_measured_steps(folder: Path) -> None:
    costs = a_tuning([0.5] * 3, step_seconds=0.04)  # at every batch size
    settings = MakeSettings(target="t", out=folder / "out")
    subject = Subject(folder, SIZES, settings.training())
    times = measured_times(subject, costs, FREE)
    assert times.forward_seconds(16 << 20, 1) == pytest.approx(0.04)
    assert times.forward_seconds(16 << 20, 16) == pytest.approx(0.04)
    speed = measured_speed(subject, costs, times)
    assert speed.measured
    assert speed.answer_tokens_per_second == pytest.approx(CONCURRENCY / 0.04)
    prefill = 0.02 + 0.0005 * PREFILL_TOKENS
    operations = 2 * SIZES.active_parameters * PREFILL_TOKENS / prefill
    assert speed.operations_per_second == pytest.approx(operations)
    training = measured_speed(subject, costs, times, gain=3.0)
    assert training.operations_per_second == pytest.approx(3 * operations)


def test_a_further_token_takes_at_least_what_it_takes_in_products(folder: Path) -> None:
    # One request at a time, with prompts of one length: no cost of a further token was seen.
    flat = PrefillLaw(base=0.05, per_token=0.0)
    costs = a_tuning([0.5] * 3, step_seconds=0.04, batches=(1,))
    costs = costs.model_copy(update={"prefill_bare": flat})
    training = MakeSettings(target="t", out=folder / "out").training()
    products = ProductTimes(one=0.001, per_token=0.0005)
    dense = TIMES.forward_seconds(16 << 20, 2) - TIMES.forward_seconds(16 << 20, 1)
    dense *= products.per_token / TIMES.per_token

    def found(sizes: TargetSizes) -> tuple[Speed, ProductTimes]:
        subject = Subject(folder, sizes, training)
        times = measured_times(subject, costs, products)
        return measured_speed(subject, costs, times), times

    speed, times = found(SIZES)
    assert times.forward_seconds(16 << 20, 11) == pytest.approx(0.04 + 10 * dense, rel=1e-4)
    step = 0.04 + (CONCURRENCY - 1) * dense
    assert speed.answer_tokens_per_second == pytest.approx(CONCURRENCY / step, rel=1e-4)
    seconds = 0.04 + (PREFILL_TOKENS - 1) * dense
    operations = 2 * SIZES.active_parameters * PREFILL_TOKENS / seconds
    assert speed.operations_per_second == pytest.approx(operations, rel=1e-4)

    experts = Experts(count=64, active=4, width=512, shared_width=0, dense_layers=0)
    sparse = replace(SIZES, experts=experts)
    _, times = found(sparse)
    share = sparse.active_parameters / sparse.parameters
    assert share < 0.2
    assert times.forward_seconds(16 << 20, 11) == pytest.approx(0.04 + 10 * dense * share)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
@pytest.mark.parametrize("is_emulated", [False, True])
def test_training_is_faster_than_vllm_where_bfloat16_is_emulated(
    dtype: str, is_emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = torch.float32 if is_emulated else torch.bfloat16
    monkeypatch.setattr(plan, "compute_dtype", lambda precision, device: computed)
    seconds = {"bfloat16": 0.6, "float32": 0.2}
    gain = training_gain(dtype, lambda rows, precision: seconds[precision])
    assert gain == pytest.approx(3.0 if is_emulated and dtype != "float32" else 1.0)
    assert training_gain(dtype, lambda rows, precision: 0.9 if precision == "float32" else 0.3) == 1


def test_the_text_names_every_stage_and_what_is_only_expected(folder: Path) -> None:
    text = planned(folder).text()
    for name in ("costs", "data", "train", "check", "tune", "in all"):
        assert f"\n{name}" in f"\n{text}"
    assert "speeds are measured" in text
    assert "a guess from the training of another, small model" in text
