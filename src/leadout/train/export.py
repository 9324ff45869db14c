"""Writes the trained drafter with its model card, settings, record and curves."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from leadout.checkpoints import Format, write_checkpoint
from leadout.data.manifest import DataFolder
from leadout.files import replacing, write_text
from leadout.models import hub_name, last_part
from leadout.train.progress import Curves, Record, TrainReport, curves_of
from leadout.train.run import Run
from leadout.train.state import load_best

CARD = "README.md"
SETTINGS = "training.yaml"
RECORD = "training.json"
CURVES = "curves.svg"


def write_best(
    run: Run, folder: Path, to: Format, target_name: str, draft_tokens: int | None = None
) -> Path:
    """Write a run's best weights as a checkpoint; `folder` appears only when it is complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    precision = getattr(torch, run.config.precision)
    weights = {name: tensor.to(precision) for name, tensor in load_best(run.folder).items()}
    shutil.rmtree(partial, ignore_errors=True)
    write_checkpoint(
        partial,
        weights,
        run.drafter_config,
        to,
        target_name=target_name,
        draft_tokens=draft_tokens,
    )
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted after its export
    partial.rename(folder)
    return folder


def write_card_and_record(
    folder: Path, report: TrainReport, data: DataFolder, records: Sequence[Record]
) -> None:
    """Write settings, record, curves and model card into the drafter's folder."""
    report = portable(report)
    report.config.write(folder / SETTINGS)
    write_text(folder / RECORD, report.model_dump_json(indent=2) + "\n")
    drawn = draw_curves(folder / CURVES, curves_of(records))
    write_text(folder / CARD, model_card(report, data, drawn))


def portable(report: TrainReport) -> TrainReport:
    """Without the paths of this machine, which mean nothing elsewhere."""
    initial = last_part(report.config.initial)
    changes = {
        "drafter": last_part(report.drafter),
        "target": hub_name(report.target) or last_part(report.target),
        "config": report.config.model_copy(update={"initial": initial}),
    }
    return report.model_copy(update=changes)


def model_card(report: TrainReport, data: DataFolder, with_curves: bool) -> str:
    """What the drafter is, how good it is, what it was trained on and how to serve it."""
    config, job = report.config, data.job
    rows = "\n".join(
        f"| {name} | {found.acceptance_length:.2f} | "
        f"{' '.join(f'{share:.2f}' for share in found.by_position)} |"
        for name, found in report.validation.by_source.items()
    )
    greedy = f"{job.sampling.greedy_share:.0%} greedy, the rest at {job.sampling.temperature}"
    picture = f"\n![Loss and acceptance over training]({CURVES})\n" if with_curves else ""
    return f"""---
library_name: leadout
tags: [dflash, speculative-decoding]
---
# DFlash drafter for {report.target}

{config.layers} layers, block size {config.block_size} (K up to {config.block_size - 1}), taps at
layers {", ".join(str(i) for i in config.target_layer_ids or ())}. The output is the target's own;
the drafter only changes how fast it is generated.

    leadout serve {report.target} --draft PATH_OF_THIS_FOLDER

Acceptance length is the mean number of tokens per step of the target in greedy decoding.

| held-out prompts | acceptance length | accepted drafts by position |
| --- | --- | --- |
{rows}

Served by vLLM over {report.served.prompts} of these prompts: {report.served.served:.2f}; predicted
for the same texts: {report.served.predicted:.2f}.
{picture}
Trained for {report.minutes:.0f} minutes ({report.steps} steps, best at {report.best_step}) on
{report.response_tokens:,} tokens of the target's own answers ({greedy}) to prompts of
{", ".join(job.sources)}. Data hash `{report.data_hash[:16]}`, target fingerprint
`{job.target_fingerprint[:16]}`. All settings are in `{SETTINGS}`, all numbers in `{RECORD}`.
"""


def draw_curves(path: Path, curves: Curves) -> bool:
    """Plot loss and acceptance over time; returns False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    loss, acceptance = figure.subplots(1, 2)
    loss.plot([r.seconds / 60 for r in curves.steps], [r.loss for r in curves.steps], lw=0.8)
    loss.set(xlabel="minutes", ylabel="loss")
    minutes = [r.seconds / 60 for r in curves.validations]
    sources = sorted({s for r in curves.validations for s in r.validation.by_source})
    for source in sources:
        found = [r.validation.by_source[source].acceptance_length for r in curves.validations]
        acceptance.plot(minutes, found, label=source, lw=1)
    overall = [r.validation.overall.acceptance_length for r in curves.validations]
    acceptance.plot(minutes, overall, label="all", lw=2, color="black")
    acceptance.set(xlabel="minutes", ylabel="held-out acceptance length")
    acceptance.legend(fontsize="small")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    return True
