"""Make the drafter in drafters/: generate data, train on two cores, measure it in vLLM.

    python experiments/train_smollm2.py TARGET PROMPTS_FOLDER WORK_FOLDER
    python experiments/train_smollm2.py TARGET PROMPTS_FOLDER WORK_FOLDER --measure

Every stage continues where an earlier call was interrupted. The evaluation sets are used for
measuring only. With `--measure` the acceptance of the shipped drafter is measured again, and the
result keeps how it was trained.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import ROOT, SHIPPED, provenance
from leadout.data.manifest import DataFolder
from leadout.train.config import TrainConfig
from leadout.train.progress import curves_of, read_log

SETTINGS = ROOT / "examples" / "smollm2-drafter.yaml"
RESULT = ROOT / "results" / "train" / "smollm2.json"
TRAINING_SETS = ("gsm8k_train", "mbpp_train", "code_train", "chat_train")
EVALUATION_SETS = ("gsm8k", "humaneval", "mt_bench", "math500", "mbpp", "alpaca", "spec_bench")
RUN = "run"  # the training folder, next to the data folder
PROCESSES = 2
SAMPLES = 11089
# One thread each: on two cores, more threads spend their time waiting for each other.
ALONE = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--measure", action="store_true", help="only measure acceptance again")
    arguments = parser.parse_args()
    if arguments.measure:
        measure_again(arguments)
        return
    if count_samples(arguments.work / "data") < SAMPLES:
        make_data(arguments.target, arguments.prompts, arguments.work / "data")
    train(arguments.target, arguments.work)
    drafter = arguments.work / RUN / "drafter"
    measured = measure(drafter, arguments)
    shutil.rmtree(SHIPPED, ignore_errors=True)
    shutil.copytree(drafter, SHIPPED)
    write_result(RESULT, arguments.target, SHIPPED, arguments.work, measured)


def measure_again(arguments: argparse.Namespace) -> None:
    found = json.loads(RESULT.read_text())
    found["trained"] = found.get("trained", found["provenance"])
    found |= measured_part(measure(SHIPPED, arguments))
    found["provenance"] = provenance(target=arguments.target, drafter=SHIPPED)
    RESULT.write_text(json.dumps(found, indent=2) + "\n")


def measure(drafter: Path, arguments: argparse.Namespace) -> Path:
    measured: Path = arguments.work / "acceptance.json"
    if not measured.exists():
        script = ROOT / "experiments" / "train_acceptance.py"
        sets = [str(arguments.prompts / f"{name}.jsonl") for name in EVALUATION_SETS]
        run([sys.executable, script, arguments.target, drafter, *sets, "--out", measured])
    return measured


def make_data(target: Path, prompts: Path, out: Path) -> None:
    sources = [str(prompts / f"{name}.jsonl") for name in TRAINING_SETS]
    prompt_flags = [word for source in [*sources, "self:3000"] for word in ("--prompts", source)]
    how = ["--limit", "4000", "--greedy-share", "0.75", "--max-new-tokens", "256"]
    running = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "leadout", "data", str(target), *prompt_flags, *how),
                *("--max-length", "1024", "--shard", f"{part}/{PROCESSES}", "--resume"),
                *("--out", str(out)),
            ],
            env={**os.environ, **ALONE},
        )
        for part in range(1, PROCESSES + 1)
    ]
    # The prompts are shuffled, so that any part of them is a representative sample.
    while any(process.poll() is None for process in running):
        time.sleep(1)
        if count_samples(out) >= SAMPLES:
            for process in running:
                process.terminate()
    if count_samples(out) < SAMPLES:
        sys.exit("leadout data failed, see above")


def count_samples(data: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in data.glob("samples-*.jsonl"))


def train(target: Path, work: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    ranks = ("--nproc-per-node", PROCESSES)
    out = work / RUN
    flags = ("--data", work / "data", "--out", out, "--config", SETTINGS)
    resume = ["--resume"] if (out / "training.yaml").exists() else []
    run([*torchrun, *ranks, "-m", "leadout", "train", target, *flags, *resume])


def run(command: list[object], folder: Path | None = None) -> None:
    arguments = [str(word) for word in command]
    if subprocess.run(arguments, env={**os.environ, **ALONE}, cwd=folder).returncode:
        sys.exit(f"failed: {' '.join(arguments)}")


def write_result(
    path: Path,
    target: Path,
    drafter: Path,
    work: Path,
    measured: Path,
    earlier: Sequence[Any] = (),
    remark: str | None = None,
) -> None:
    """Data, training and acceptance of a drafter; `measured` is from train_acceptance.py.

    `earlier` are the runs of the drafter that this one was continued from; `remark` says what the
    settings of this one do not.
    """
    data = DataFolder(work / "data")
    config = TrainConfig.resolve({}, work / RUN / "training.yaml").model_dump(mode="json")
    config["initial"] = Path(config["initial"]).name  # no folder of this machine
    minutes = max(record.seconds for record in read_log(work / RUN / "run")) / 60
    this_run = {
        "settings": config,
        "minutes": minutes,
        "data_response_tokens": data.response_tokens,
        **({} if remark is None else {"remark": remark}),
        **curves(work / RUN),
    }
    runs = [*earlier, this_run]
    result = {
        "provenance": provenance(target=target, drafter=drafter),
        "data_samples": sum(c.samples for m in data.manifests for c in m.counts.values()),
        "data_response_tokens": data.response_tokens,
        "data_by_source": {
            name: sum(m.counts[name].response_tokens for m in data.manifests if name in m.counts)
            for name in sorted({name for m in data.manifests for name in m.counts})
        },
        "training_minutes": sum(run["minutes"] for run in runs),
        **measured_part(measured),
        "runs": runs,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def measured_part(measured: Path) -> dict[str, Any]:
    acceptance = json.loads(measured.read_text())["sets"]
    return {
        "served_acceptance_length": {name: each["served"] for name, each in acceptance.items()},
        "acceptance": acceptance,
        "ahead": mean_ahead(acceptance),
    }


def mean_ahead(acceptance: dict[str, Any]) -> dict[str, float]:
    """Acceptance length predicted on other texts and served, as means over all sets."""
    found = {
        key: sum(each["ahead"][key] for each in acceptance.values()) / len(acceptance)
        for key in ("predicted", "served")
    }
    return {**found, "difference": abs(found["predicted"] / found["served"] - 1)}


def curves(run: Path) -> dict[str, object]:
    found = curves_of(read_log(run / "run"))
    return {
        "held_out_curve": [
            {
                "step": record.step,
                "minutes": record.seconds / 60,
                "acceptance_length": record.validation.overall.acceptance_length,
                "by_source": {
                    name: of_source.acceptance_length
                    for name, of_source in record.validation.by_source.items()
                },
            }
            for record in found.validations
        ],
        "loss_curve": [
            {"step": r.step, "minutes": r.seconds / 60, "loss": r.loss} for r in found.steps[::20]
        ],
    }


if __name__ == "__main__":
    main()
