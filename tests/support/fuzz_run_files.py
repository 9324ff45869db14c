"""Files that Leadout's commands write and read again, for the fuzzing: a valid sample of each."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from sample_results import figures, offline, whole_result
from sample_rounds import measured, setup
from torch import nn

from leadout.bench.results import ROUNDS, RoundsFile
from leadout.bench.results import SETTINGS as BENCH_SETTINGS
from leadout.check.baseline import baseline_findings, read_baseline
from leadout.control.tuned_file import gain, read_tuned, write_tuned
from leadout.data.manifest import DataFolder, Job, Manifest, Sampling, manifest_path, shard_path
from leadout.data.prompt_record import NAME as PROMPT_RECORD
from leadout.data.prompt_record import PromptRecord
from leadout.data.prompts import prompts_hash, read_prompts, without_duplicates
from leadout.engine.capture_store import INFO, CaptureInfo, read_info, sample_id, segment_name
from leadout.engine.watch_record import WatchRecord, read_records, write_record
from leadout.evaluate.blocks import split
from leadout.learn.config import CycleSettings
from leadout.learn.data import copy_newest, prompt_key
from leadout.learn.work_folder import CYCLE, CycleFile, WorkFolder
from leadout.make.plan import MakePlan, PlannedStage, Speed
from leadout.make.settings import MakeSettings
from leadout.make.state import STATE as MAKE_STATE
from leadout.make.state import MakeState, StageRecord
from leadout.registry import LAST, LEDGER, MANIFEST, POINTER, ExpectedAcceptance, Registry
from leadout.sealed import Keys
from leadout.shards import Sample, usable_samples
from leadout.train.budget import BUDGET, Budget
from leadout.train.config import TrainConfig
from leadout.train.init import TokenCounts
from leadout.train.progress import LOG, read_log
from leadout.train.progress import StepRecord as TrainStep
from leadout.train.state import (
    BEST,
    STATE,
    MasterWeights,
    RunStatus,
    load_best,
    load_state,
    save_best,
    save_state,
)
from support.fuzzing import Reader, put, write_lines
from support.tuned_files import a_tuning

VOCAB = 64
PRINT = "f" * 64
WRITTEN = datetime(2026, 1, 31, 9, 30, tzinfo=UTC)
SEGMENT = segment_name(WRITTEN, 4711)
TUNING = a_tuning([0.8, 0.5], batches=(1, 4))


# Control, registry


def _use_tuned(folder: Path) -> None:
    tuned = read_tuned(folder / "tuned.json")
    costs, curve = tuned.costs(), tuned.curve()
    gain(costs, curve, 1, max(range(len(curve.tokens))))
    tuned.k_at(1), tuned.k_at(tuned.max_batch), tuned.losing_at(tuned.max_batch)


def _write_registry(folder: Path) -> None:
    drafter = folder / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    (drafter / "a.txt").write_text("x")
    registry = Registry(folder)
    expected = ExpectedAcceptance(acceptance_length=2.0, low=1.9, high=2.1, requests=5)
    for parent in (None, 1):
        registry.publish(
            drafter, target_fingerprint=PRINT, parent=parent, expected={"traffic": expected}
        )
    registry.point_to(2, "promoted")
    registry.mark_bad(1, "accepted too little")
    registry.record("promoted", 2, "better", {"gain": 0.1, "texts": 40, "held": True, "kind": "x"})
    write_record(registry, WatchRecord(server="a:8000", version=2, found="watching"))


def _pointed(folder: Path) -> None:
    registry = Registry(folder)
    registry.verify(registry.require_pointer().version)


# Data, captured traffic, prompts

SAMPLES = [
    Sample(
        id=sample_id(WRITTEN, f"r{n}"),
        source="traffic",
        prompt=[n, 2, 3],
        response=list(range(n, n + 8)),
        temperature=0.0,
    )
    for n in range(4)
]


def _write_capture(folder: Path) -> None:
    info = CaptureInfo(target="t", target_fingerprint=PRINT)
    (folder / INFO).write_text(info.model_dump_json())
    write_lines(folder / SEGMENT, *SAMPLES)


def _use_segment(folder: Path) -> None:
    for found in usable_samples(folder / SEGMENT, VOCAB):
        if found is not None:
            prompt_key(found[1])


def _copy_capture(folder: Path) -> None:
    shutil.rmtree(folder / "copy", ignore_errors=True)
    copy_newest(folder, PRINT, VOCAB, folder / "copy", Keys())


def _write_data(folder: Path) -> None:
    sampling = Sampling(
        greedy_share=0.5, temperature=1.0, top_p=1.0, max_new_tokens=8, max_length=64,
        samples_per_prompt=1, seed=0,
    )  # fmt: skip
    job = Job(
        target="t", target_fingerprint=PRINT, tokenizer_hash="h", template_hash="h", thinking=None,
        sources=["a"], prompts_hash="h", limit=None, dtype="float32", sampling=sampling, parts=1,
    )  # fmt: skip
    manifest = Manifest(job=job, part=1, complete=True, counts={}, skipped=0, versions={"a": "1"})
    manifest.write(manifest_path(folder, 1, 1))
    write_lines(shard_path(folder, 1, 1), *SAMPLES)


def _use_data(folder: Path) -> None:
    data = DataFolder(folder)
    counts = TokenCounts(VOCAB)
    samples = data.samples(lambda sample: counts.add(sample.response))
    counts.total(), split(samples.facts, VOCAB, 4), data.content_hash(), data.response_tokens
    for index in range(len(samples)):
        samples[index]


PROMPTS = [
    {"id": "x", "prompt": "hello", "system": "short"},
    {"turns": ["a", "b"], "chat_template_kwargs": {"thinking": True}},
    {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [{"function": {"arguments": '{"a": 1}'}}]},
            {"role": "tool", "content": [{"type": "text", "text": "yo"}], "tool_call_id": "1"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
]


def _write_prompts(folder: Path) -> None:
    (folder / "p.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in PROMPTS))


def _write_parquet(folder: Path) -> None:
    from pyarrow import Table, parquet

    rows = [{"prompt": f"hello {n}", "id": str(n), "system": "short"} for n in range(4)]
    parquet.write_table(Table.from_pylist(rows), folder / "p.parquet", compression="none")


def _use_prompts(folder: Path, name: str) -> None:
    prompts, _ = without_duplicates(read_prompts([str(folder / name)], reject=lambda *_: None))
    prompts_hash(prompts)


# Training


class _Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 3, bias=False)
        self.norm = nn.Parameter(torch.ones(2))


def _training() -> tuple[MasterWeights, list[torch.optim.Optimizer]]:
    masters = MasterWeights(_Weights(), torch.float32)
    return masters, [torch.optim.AdamW(masters.masters.values())]


def _write_state(folder: Path) -> None:
    masters, optimizers = _training()
    masters.clear_gradients()
    optimizers[0].step()
    save_state(folder, masters, optimizers, RunStatus(step=3, seconds=1.0))
    save_best(folder, masters)


def _write_log(folder: Path) -> None:
    step = TrainStep(
        step=1, seconds=1.0, loss=2.0, learning_rate=0.1, gradient_norm=1.0,
        blocks_per_second=9.0, drafts_hit=1.5,
    )  # fmt: skip
    write_lines(folder / LOG, step, step)


def _budget() -> Budget:
    return Budget(
        minutes=1.0, tokens=None, seconds_per_step=0.1, layers=1, anchors=16, batch_sequences=8,
        steps=600, epochs=1.5, visits=2.0,
    )  # fmt: skip


def _make_state() -> MakeState:
    settings = MakeSettings(target="t", out=Path("o"))
    plan = MakePlan(
        speed=Speed(
            measured=True, answer_tokens_per_second=9.0, session_tokens_per_second=5.0,
            operations_per_second=1e9,
        ),
        layers=1, block_size=8, parameters=5, sources=["self:9"], limit=None, samples=9,
        answer_tokens=90, train_minutes=2.0, train_tokens=None, blocks=100, low=1.1, high=1.3,
        stages=[PlannedStage(name="data", what="text", minutes=1.0)],
    )  # fmt: skip
    record = StageRecord(file="tuned.json", exit_code=1, seconds=9.0, ended="2026-01-31")
    fresh = MakeState.started(settings, settings.training(), PRINT)
    return fresh.with_stage("costs", record).model_copy(update={"plan": plan})


def _use_make_state(folder: Path) -> None:
    state = MakeState.read(folder)
    if state is None:  # no such file
        return
    state.require_same(_make_state(), folder)
    if state.plan is not None:
        state.plan.text()


def _write_cycle(folder: Path) -> None:
    cycle = CycleFile(
        number=1, parent=1, parent_fingerprint=PRINT, target_fingerprint=PRINT, traffic="a",
        replay="b", config=CycleSettings(), training=TrainConfig(), segments={"c": 3},
        mix_hash=PRINT,
    )  # fmt: skip
    (folder / CYCLE).write_text(cycle.model_dump_json())


YAML_SETTINGS = "layers: 2\nblock_size: 8\nlearning_rate: 0.001\ntarget_layer_ids: [1, 3]\n"


# Check, bench


def _baseline() -> Any:
    lengths = [2.0 + 0.05 * number for number in range(12)]
    return whole_result(offline=offline().model_copy(update={"texts": figures(lengths)}))


RESULT = _baseline()


def _compare(folder: Path) -> None:
    baseline_findings(RESULT, read_baseline(folder / "b.json"))


SETUP = setup(sets=("math",), concurrencies=(1,), rounds=1)


def _write_bench(folder: Path) -> None:
    RoundsFile(folder).begin(SETUP, resume=False)
    RoundsFile(folder).append(measured(SETUP, lambda cell: 30.0))


def _resume(folder: Path) -> None:
    RoundsFile(folder).begin(SETUP, resume=True)


FILES_OF_RUNS = [
    Reader("tuned file", "tuned.json", "json",
           lambda folder: write_tuned(TUNING, folder / "tuned.json"), _use_tuned),
    Reader("registry: pointer", POINTER, "json", _write_registry, _pointed),
    Reader("registry: manifest", f"versions/0002/{MANIFEST}", "json", _write_registry, _pointed),
    Reader("registry: bad mark", "marks/0001.json", "json", _write_registry,
           lambda folder: Registry(folder).bad_mark(1)),
    Reader("registry: ledger", LEDGER, "json", _write_registry,
           lambda folder: Registry(folder).ledger()),
    Reader("registry: last number", LAST, "json", _write_registry,
           lambda folder: Registry(folder)._take_number()),
    Reader("registry: watch record", "watches/0002/a_8000.json", "json", _write_registry,
           lambda folder: read_records(Registry(folder), 2), is_tolerant=True),
    Reader("capture: target", INFO, "json", _write_capture, read_info),
    Reader("capture: segment", SEGMENT, "json", _write_capture, _use_segment, is_tolerant=True),
    Reader("capture: copy", SEGMENT, "json", _write_capture, _copy_capture, is_tolerant=True),
    Reader("data: manifest", "manifest-1-of-1.json", "json", _write_data, _use_data),
    Reader("data: samples", "samples-1-of-1.jsonl", "json", _write_data, _use_data),
    Reader("data: prompts", "p.jsonl", "json", _write_prompts,
           lambda folder: _use_prompts(folder, "p.jsonl")),
    Reader("data: parquet", "p.parquet", "bytes", _write_parquet,
           lambda folder: _use_prompts(folder, "p.parquet")),
    Reader("training prompts", PROMPT_RECORD, "json",
           lambda folder: PromptRecord.of([[1, 2], [3]]).write(folder), PromptRecord.read),
    Reader("training.yaml", "t.yaml", "yaml", put("t.yaml", YAML_SETTINGS),
           lambda folder: TrainConfig.resolve({}, folder / "t.yaml")),
    Reader("training: log", LOG, "json", _write_log, lambda folder: list(read_log(folder))),
    Reader("training: state", STATE, "safetensors", _write_state,
           lambda folder: load_state(folder, *_training())),
    Reader("training: best weights", BEST, "safetensors", _write_state, load_best),
    Reader("training: budget", BUDGET, "json", lambda folder: _budget().write(folder),
           Budget.read),
    Reader("make: state", MAKE_STATE, "json", lambda folder: _make_state().write(folder),
           _use_make_state),
    Reader("learning: cycle", CYCLE, "json", _write_cycle,
           lambda folder: WorkFolder(folder).interrupted_cycle(), is_tolerant=True),
    Reader("check: baseline", "b.json", "json", put("b.json", RESULT.model_dump_json()), _compare),
    Reader("bench: rounds", ROUNDS, "json", _write_bench, _resume),
    Reader("bench: settings", BENCH_SETTINGS, "json", _write_bench, _resume),
]  # fmt: skip
