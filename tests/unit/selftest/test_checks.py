"""Every check passes where it should, and fails where something is wrong."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from leadout.check.parity import LOGITS, Reference
from leadout.checkpoints import load_drafter, write_checkpoint
from leadout.control.tuned_file import ServerConfig
from leadout.engine.capture_store import SOURCE, sample_id, segment_name
from leadout.engine.inspection import DraftStep, WorkerFacts
from leadout.engine.metrics import LIVE_GAUGES, acceptance_families, capture_families
from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.selftest import checks
from leadout.selftest.checks import EqualDrafts, SwapSeen
from leadout.selftest.result import Status
from leadout.shards import Sample
from support.drafters import TINY_DRAFTER, random_drafter

PASS, FAIL, NOT_APPLICABLE = Status.PASS, Status.FAIL, Status.NOT_APPLICABLE

WORKER = WorkerFacts(
    draft_class=checks.LEADOUT_CLASS,
    runner="V2",
    dtype="float32",
    config=ServerConfig(
        async_scheduling=True,
        cuda_graphs="FULL_AND_PIECEWISE",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        quantization=None,
        kv_cache_dtype="auto",
    ),
    draft_tokens=4,
    device="cuda",
)
# What a worker reports with LEADOUT_PLUGIN=0.
PLUGIN_OFF = WORKER.model_copy(
    update={"draft_class": "vllm.model_executor.models.qwen3_dflash.DFlashQwen3ForCausalLM"}
)


def test_the_draft_class_is_leadouts_on_every_worker() -> None:
    assert checks.check_draft_class([WORKER, WORKER]).status is PASS
    for workers in ([PLUGIN_OFF], [WORKER, PLUGIN_OFF], []):
        row = checks.check_draft_class(workers)
        assert row.status is FAIL
        assert row.remedy is not None


def test_the_class_that_is_expected_exists() -> None:
    from leadout.engine.draft_model import LeadoutDFlashForCausalLM as Served

    assert f"{Served.__module__}.{Served.__qualname__}" == checks.LEADOUT_CLASS


def test_async_scheduling_is_on_where_vllm_has_it_on() -> None:
    synchronous = WORKER.config.model_copy(update={"async_scheduling": False})
    off = WORKER.model_copy(update={"config": synchronous})
    assert checks.check_async([WORKER], in_stock=True).status is PASS
    assert checks.check_async([WORKER, off], in_stock=True).status is FAIL
    assert checks.check_async([], in_stock=True).status is FAIL
    assert checks.check_async([off], in_stock=False).status is NOT_APPLICABLE


def test_steps_are_counted_in_the_table_that_vllm_logs() -> None:
    from vllm.compilation.cuda_graph import CUDAGraphLogging, CUDAGraphStat
    from vllm.config import CUDAGraphMode

    logging = CUDAGraphLogging(CUDAGraphMode.FULL_AND_PIECEWISE, [8, 16])
    for _ in range(12):
        logging.observe(CUDAGraphStat(15, 16, 1, str(CUDAGraphMode.FULL)))
    logging.observe(CUDAGraphStat(300, 304, 4, str(CUDAGraphMode.PIECEWISE)))
    prefix = "(APIServer pid=7) INFO 11-16 09:19:42 [cuda_graph.py:100] "
    log = "".join(f"{prefix}{line}\n" for line in logging.generate_metric_table().splitlines())
    assert checks.graph_steps(log + "other lines\n" + log) == {"FULL": 24, "PIECEWISE": 2}


@pytest.mark.parametrize(
    ("mode", "stock", "live", "expected"),
    [
        ("FULL_AND_PIECEWISE", {"FULL": 95, "PIECEWISE": 5}, {"FULL": 92, "PIECEWISE": 8}, PASS),
        ("FULL_AND_PIECEWISE", {"FULL": 95, "PIECEWISE": 5}, {"FULL": 40, "PIECEWISE": 60}, FAIL),
        ("FULL_AND_PIECEWISE", {"FULL": 95, "PIECEWISE": 5}, {"PIECEWISE": 60}, FAIL),
        ("FULL_AND_PIECEWISE", {"FULL": 95}, {}, NOT_APPLICABLE),
        ("FULL_AND_PIECEWISE", None, {"FULL": 95}, NOT_APPLICABLE),
        ("NONE", {"NONE": 5}, {"NONE": 5}, NOT_APPLICABLE),
        ("PIECEWISE", {"PIECEWISE": 5}, {"PIECEWISE": 5}, NOT_APPLICABLE),
    ],
)
def test_live_control_keeps_full_graphs(
    mode: str, stock: dict[str, int] | None, live: dict[str, int], expected: Status
) -> None:
    assert checks.check_graphs(mode, stock, live).status is expected


# Drafts

CONFIG = replace(TINY_DRAFTER, target_num_layers=4)
K = CONFIG.max_draft_tokens
PROMPT, BLOCKS = 12, 4


def drafter(folder: Path, seed: int) -> Path:
    write_checkpoint(folder, random_drafter(CONFIG, seed).state_dict(), CONFIG, "zlab")
    return folder


def steps_of(target: Path, drafter: Path, *, cached: int = 0) -> list[DraftStep]:
    """What an engine records that runs this drafter; `cached` tokens are in the prefix cache."""
    width = len(CONFIG.target_layer_ids) * 64
    states = torch.randn(PROMPT + BLOCKS, width, generator=torch.Generator().manual_seed(0))
    weights = load_target_weights(TargetFiles(target), torch.float32, torch.device("cpu"))
    model = load_drafter(drafter, torch.float32)
    reference = Reference(model, weights, states)
    steps = []
    for block in range(BLOCKS):  # every step commits one token
        anchor, token = PROMPT + block, 5 + block
        start = cached if block == 0 else anchor - 1
        logits = reference.block(anchor, token, K)[LOGITS]
        steps.append(
            DraftStep(
                torch.arange(start, anchor),
                states[start:anchor],
                torch.tensor(token),
                model.to_target_ids(logits.argmax(dim=-1)),
            )
        )
    return steps


def test_drafts_of_the_same_drafter_are_equal(target: Path, tmp_path: Path) -> None:
    served = drafter(tmp_path / "served", seed=0)
    steps = steps_of(target, served)
    idle = replace(steps[0], drafts=steps[0].drafts[:0])  # a step with K = 0
    found = checks.compare_drafts([steps, [*steps, idle], []], served, target, "float32")
    assert found == EqualDrafts(2 * BLOCKS * K, 2 * BLOCKS * K)
    assert checks.check_drafts(found).status is PASS


def test_a_drafter_that_changed_after_the_start_is_noticed(target: Path, tmp_path: Path) -> None:
    steps = steps_of(target, drafter(tmp_path / "served", seed=0))
    found = checks.compare_drafts([steps], drafter(tmp_path / "now", seed=1), target, "float32")
    assert found.share < 0.5
    row = checks.check_drafts(found)
    assert row.status is FAIL
    assert row.remedy is not None


def test_a_block_after_a_cached_prefix_is_not_compared(target: Path, tmp_path: Path) -> None:
    served = drafter(tmp_path / "served", seed=0)
    steps = steps_of(target, served, cached=4)
    found = checks.compare_drafts([steps], served, target, "float32")
    assert found.drafts == 0
    assert checks.check_drafts(found).status is FAIL  # nothing was proven


# Swap

EQUAL, OTHER = EqualDrafts(40, 40), EqualDrafts(3, 40)
THERE = SwapSeen(2, 2, "two", "two", 0.004, 120, EQUAL)
BACK = SwapSeen(1, 1, "one", "one", 0.003, 120, EQUAL)


def test_a_swap_there_and_back() -> None:
    row = checks.check_swap([THERE, BACK])
    assert row.status is PASS
    assert row.numbers == {"pause_seconds_1": 0.004, "pause_seconds_2": 0.003}


@pytest.mark.parametrize(
    ("swaps", "expected"),
    [
        ([replace(THERE, served=1), BACK], "names version 1 after a swap to 2"),
        ([replace(THERE, fingerprint="one"), BACK], "after a swap to 2"),
        ([replace(THERE, tokens_after=0), BACK], "no request got a token"),
        ([replace(THERE, drafts=OTHER), BACK], "3 of 40 drafts equal"),
        ([THERE, replace(BACK, drafts=EqualDrafts(1, 1))], "after the swap to 1"),
        ([THERE], "1 of 2 swaps"),
    ],
)
def test_a_swap_that_is_not_visible_fails(swaps: list[SwapSeen], expected: str) -> None:
    row = checks.check_swap(swaps)
    assert row.status is FAIL
    assert expected in row.measured


# Capture and metrics


def capture(folder: Path, *lengths: tuple[int, int]) -> Path:
    folder.mkdir(exist_ok=True)
    now = datetime(2026, 1, 31, tzinfo=UTC)
    samples = [
        Sample(
            id=sample_id(now, str(number)),
            source=SOURCE,
            prompt=[1] * prompt,
            response=[2] * response,
            temperature=0.0,
        )
        for number, (prompt, response) in enumerate(lengths)
    ]
    lines = "".join(f"{sample.model_dump_json()}\n" for sample in samples)
    (folder / segment_name(now, 7)).write_text(lines)
    return folder


def test_finished_requests_are_on_the_disk(tmp_path: Path) -> None:
    folder = capture(tmp_path / "capture", (9, 16), (11, 16), (30, 2))
    assert checks.check_capture(folder, [(9, 16), (11, 16)]).status is PASS


def test_missing_requests_and_missing_files_are_noticed(tmp_path: Path) -> None:
    assert checks.check_capture(tmp_path / "nothing", [(9, 16)]).status is FAIL
    folder = capture(tmp_path / "capture", (9, 16))
    row = checks.check_capture(folder, [(9, 16), (9, 16)])
    assert row.status is FAIL
    assert "1 of 2" in row.measured


METRICS = """# HELP leadout:acceptance_length Tokens per target step.
leadout:acceptance_length{engine="0",model_name="m"} 2.5
leadout:acceptance_rate{engine="0",model_name="m",position="0"} 0.7
leadout:draft_length{engine="0",model_name="m"} 4.0
leadout:skipped_drafts{engine="0",model_name="m"} 0.1
leadout:copied_drafts{engine="0",model_name="m"} 0.0
leadout:captured_requests_total{engine="0",model_name="m"} 12.0
"""
ALL_PARTS = ["draft class", "live", "capture", "registry"]


def test_metrics_of_all_parts() -> None:
    assert checks.check_metrics(METRICS, ALL_PARTS).status is PASS


def test_missing_metrics_are_named() -> None:
    without = "\n".join(line for line in METRICS.splitlines() if "draft_length{" not in line)
    row = checks.check_metrics(without, ALL_PARTS)
    assert row.status is FAIL
    assert row.measured == "missing: leadout:draft_length"
    assert checks.check_metrics(without, ["draft class", "capture"]).status is PASS
    assert checks.check_metrics("", ["draft class"]).status is FAIL


def test_the_expected_metrics_exist() -> None:
    names = {each.name for each in (*acceptance_families(), *capture_families())}
    known = names | {f"{name}_total" for name in names} | set(LIVE_GAUGES)
    assert {name for names in checks.METRIC_NAMES.values() for name in names} <= known


# Overhead


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([0.99, 1.0, 0.98, 1.01, 0.99, 1.0], PASS),
        ([1.4, 1.5, 1.45, 1.5, 1.4, 1.45], PASS),  # live control may be faster
        ([0.80, 0.81, 0.79, 0.80, 0.82, 0.80], FAIL),
        ([0.6, 1.3, 0.7, 1.2, 0.8, 1.1], NOT_APPLICABLE),  # a busy machine
        ([0.5, 0.5], NOT_APPLICABLE),
    ],
)
def test_overhead_is_judged_by_its_interval(ratios: list[float], expected: Status) -> None:
    row = checks.check_overhead("live", ratios)
    assert row.name == "overhead of live"
    assert row.status is expected
