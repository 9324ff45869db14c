"""The finished drafter: verified in vLLM, and written with its model card, record and curves.

To verify it, validation predicts the acceptance for the texts that vLLM wrote, so both count the
same steps; they differ only if vLLM and the training code do not compute the same drafts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from leadout.checkpoints import Format, load_drafter, write_checkpoint
from leadout.data.manifest import DataFolder
from leadout.data.prompt_record import PromptRecord
from leadout.engine.offline import SessionRequest, run_session
from leadout.errors import NEGATIVE, LeadoutError
from leadout.evaluate.acceptance import (
    DraftHead,
    Validation,
    accepted_drafts,
    along_decoding,
    summarise,
)
from leadout.evaluate.blocks import BlockForward, TrainingSequence
from leadout.evaluate.reference import reference_device, reference_target
from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.files import replacing, write_text
from leadout.models import hub_name, last_part
from leadout.provenance import Provenance
from leadout.train.budget import Budget, Outlook
from leadout.train.config import TrainConfig
from leadout.train.progress import Curves, Record, curves_of
from leadout.train.run import Corpus, Run, evenly_spaced
from leadout.train.state import load_best

CARD = "README.md"
SETTINGS = "training.yaml"
RECORD = "training.json"
CURVES = "curves.svg"
SERVED_PROMPTS = 24
SERVED_TOKENS = 128
MAX_DIFFERENCE = 0.05  # relative, between served and predicted acceptance length


class ServedDiffersError(LeadoutError):
    """vLLM accepts more or fewer drafts than validation predicts."""

    exit_code = NEGATIVE


class ServedAcceptance(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: int
    max_tokens: int
    draft_tokens: int
    served: float  # acceptance length by vLLM's counters
    served_by_position: list[float]
    served_steps: int
    predicted: float  # by validation, for the same texts
    predicted_steps: int

    @property
    def difference(self) -> float:
        return abs(self.predicted - self.served) / self.served


class TrainReport(BaseModel):
    """The result of a run: the numbers a person needs before deploying the drafter."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    drafter: str
    steps: int
    best_step: int
    minutes: float
    data_hash: str
    response_tokens: int
    config: TrainConfig
    validation: Validation  # of the best step
    served: ServedAcceptance
    # Identity of the target and its template; None in records of earlier versions.
    target_fingerprint: str | None = None
    template_hash: str | None = None
    thinking: bool | None = None
    provenance: Provenance | None = None
    budget: Budget | None = None  # of --minutes or --tokens
    outlook: Outlook | None = None

    def text(self) -> str:
        by_source = ", ".join(
            f"{name} {found.acceptance_length:.2f}"
            for name, found in self.validation.by_source.items()
        )
        ahead = "" if self.outlook is None else f"\n{self.outlook.text()}"
        return (
            f"{self.drafter}: drafter for {self.target}, trained for {self.minutes:.0f} minutes, "
            f"best at step {self.best_step} of {self.steps}\n"
            f"held-out acceptance length {self.validation.overall.acceptance_length:.3f} tokens "
            f"per step ({by_source})\n"
            f"served by vLLM {self.served.served:.3f}, predicted for the same texts "
            f"{self.served.predicted:.3f} ({self.served.difference:.1%} difference){ahead}"
        )


def serve_held_out(
    run: Run, target: Path, drafter: Path, vllm_flags: Sequence[str] = ()
) -> ServedAcceptance:
    """Compare on a short decode of held-out prompts, spread over the sources."""
    prompts, positions = _served_prompts(run.corpus), run.drafter_config.max_positions
    longest = max(len(prompt) for prompt in prompts)
    length = min(longest + SERVED_TOKENS + run.config.block_size, positions)
    return compare_with_served(
        target,
        drafter,
        prompts,
        max_tokens=max(1, longest_served(run.corpus, positions) - longest),
        max_length=length,
        # As trained: without instructions for bfloat16 a large target would take minutes more.
        precision=run.computed_in,
        urls=run.config.states_from,
        states_served=run.config.states == "served",
        vllm_flags=vllm_flags,
    )


def longest_served(corpus: Corpus, max_positions: int) -> int:
    """The most tokens that a text of `serve_held_out` has.

    A server of hidden states computes one more token, for which there must be a position.
    """
    longest = max(len(prompt) for prompt in _served_prompts(corpus))
    return min(longest + SERVED_TOKENS, max_positions - 1)


def _served_prompts(corpus: Corpus) -> list[list[int]]:
    chosen = evenly_spaced(corpus.split.validation, SERVED_PROMPTS)
    return [corpus.samples[index].prompt for index in chosen]


def compare_with_served(
    target: Path,
    drafter: Path,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    max_length: int,
    precision: torch.dtype,
    urls: Sequence[str] = (),
    states_served: bool = False,
    vllm_flags: Sequence[str] = (),
) -> ServedAcceptance:
    """Decode greedily in vLLM with the largest K, then predict for the same texts.

    The target's states for the prediction come from servers if there are `urls`, or from one that
    is started here if they are to be served. Every engine gets `vllm_flags`.
    """
    model = load_drafter(drafter, precision)
    size = model.config.block_size
    request = SessionRequest(
        target=str(target),
        drafter=str(drafter),
        draft_tokens=size - 1,
        prompts={"held out": [list(prompt) for prompt in prompts]},
        max_tokens=max_tokens,
        max_length=max_length,
        dtype=str(precision).removeprefix("torch."),
        vllm_flags=list(vllm_flags),
    )
    (served,) = run_session(request).runs
    sequences = [
        TrainingSequence(str(number), "served", torch.tensor([*prompt, *answer]), len(prompt))
        for number, (prompt, answer) in enumerate(zip(prompts, served.answers, strict=True))
    ]
    # The engine has ended and freed it.
    device = reference_device(target, precision, vllm_flags)
    weights = load_target_weights(TargetFiles(target), precision, device)
    forward = BlockForward(model.to(device), weights.embedding)
    head = DraftHead.of(model, weights)
    taps = model.config.target_layer_ids
    with reference_target(
        target,
        taps,
        precision,
        longest=max(len(sequence) for sequence in sequences),
        device=device,
        urls=urls,
        served=states_served,
        vllm_flags=vllm_flags,
    ) as reference:
        states = reference.source(taps)
        drafts = accepted_drafts(forward, head, states, list(enumerate(sequences)), size)
    return ServedAcceptance(
        prompts=len(prompts),
        max_tokens=max_tokens,
        draft_tokens=size - 1,
        served=served.acceptance_length,
        served_by_position=[n / max(served.steps, 1) for n in served.accepted_by_position],
        served_steps=served.steps,
        predicted=summarise(drafts, size).overall.acceptance_length,
        predicted_steps=sum(len(along_decoding(each.counts)) for each in drafts),
    )


def require_agreement(acceptance: ServedAcceptance, drafter: Path) -> None:
    if acceptance.served_steps == 0:
        raise ServedDiffersError(
            f"{drafter}: vLLM decoded {acceptance.prompts} prompts without a single draft. "
            "Do not deploy this drafter before the cause is found."
        )
    if acceptance.difference > MAX_DIFFERENCE:
        raise ServedDiffersError(
            f"{drafter}: the acceptance length in vLLM is {acceptance.served:.3f}, but validation "
            f"predicts {acceptance.predicted:.3f} for the same texts. They differ by "
            f"{acceptance.difference:.1%}, expected at most {MAX_DIFFERENCE:.0%}: vLLM and "
            "training do not compute the same drafts. Do not deploy this drafter before the cause "
            "is found."
        )


def write_best(
    run: Run, folder: Path, to: Format, target_name: str, draft_tokens: int | None = None
) -> Path:
    """Write a run's best weights as a checkpoint; `folder` appears only when it is complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    precision = getattr(torch, run.config.precision)
    weights = {name: tensor.to(precision) for name, tensor in load_best(run.folder).items()}
    if run.copied_head is not None:
        weights |= run.copied_head.tensors(precision)
    shutil.rmtree(partial, ignore_errors=True)
    shape = run.drafter_config
    write_checkpoint(
        partial, weights, shape, to, target_name=target_name, draft_tokens=draft_tokens
    )
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted after its export
    partial.rename(folder)
    return folder


def write_card_and_record(
    folder: Path,
    report: TrainReport,
    data: DataFolder,
    records: Sequence[Record],
    prompts: Iterable[Sequence[int]],
) -> None:
    """Write settings, records, curves and model card into the drafter's folder.

    `prompts` are those that it was trained on.
    """
    PromptRecord.of(prompts).write(folder)
    report = _portable(report)
    report.config.write(folder / SETTINGS)
    write_text(folder / RECORD, report.model_dump_json(indent=2) + "\n")
    drawn = _draw_curves(folder / CURVES, curves_of(records))
    write_text(folder / CARD, _model_card(report, data, drawn))


def _portable(report: TrainReport) -> TrainReport:
    """Without the paths of this machine, which mean nothing elsewhere."""
    initial = last_part(report.config.initial)
    changes = {
        "drafter": last_part(report.drafter),
        "target": hub_name(report.target) or last_part(report.target),
        "config": report.config.model_copy(update={"initial": initial, "states_from": ()}),
    }
    return report.model_copy(update=changes)


def _model_card(report: TrainReport, data: DataFolder, with_curves: bool) -> str:
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


def _draw_curves(path: Path, curves: Curves) -> bool:
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
