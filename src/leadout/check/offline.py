"""The reference's half of a check: acceptance along the target's texts, and what would raise it.

The drafter is taken as the engine serves it: with the block cut to K slots after the anchor, and
with the taps in the order of depth, whatever the order in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from leadout.check.acceptance import AcceptanceTable, TextAcceptance, tabulate
from leadout.check.diagnose import findings_of, layers_needed, repair_of, variants_of
from leadout.check.findings import Finding, Gravity
from leadout.check.hypotheses import Surroundings, Variant
from leadout.check.probe import FINALISTS, Probe, Text, Trial, drafter_of, try_variants
from leadout.check.request import Progress
from leadout.check.result import OfflineAcceptance, Tried
from leadout.checkpoints import Checkpoint, load_weights
from leadout.dflash.config import DrafterConfig
from leadout.pairing import TargetFacts

CONTEXT_EDGES = (0, 128, 256, 512, 1024, 2048, 4096)
# Below this, drafting costs more than it brings on any engine.
HARDLY_ANY = 1.15


@dataclass(frozen=True, slots=True)
class Examination:
    offline: OfflineAcceptance
    tried: list[Tried]
    findings: list[Finding]
    repair: Variant | None  # in terms of the drafter's own block size


def as_served(config: DrafterConfig, draft_tokens: int) -> DrafterConfig:
    return replace(
        config,
        block_size=draft_tokens + 1,
        target_layer_ids=tuple(sorted(config.target_layer_ids)),
    )


def served_weights(checkpoint: Checkpoint, precision: torch.dtype) -> dict[str, Tensor]:
    return {
        name: tensor.to(precision) if tensor.is_floating_point() else tensor
        for name, tensor in load_weights(checkpoint).items()
    }


def make_probe(
    target: Path,
    model: nn.Module,
    facts: TargetFacts,
    config: DrafterConfig,
    texts: Sequence[Text],
    precision: torch.dtype,
    progress: Progress,
) -> Probe:
    report = progress.stage("states of the target", len(texts))
    return Probe(target, model, texts, layers_needed(config, facts.num_layers), precision, report)


def examine(
    probe: Probe,
    facts: TargetFacts,
    checkpoint: Checkpoint,
    draft_tokens: int,
    special_tokens: Sequence[int],
    precision: torch.dtype,
    progress: Progress,
) -> Examination:
    """Acceptance, and every known cause tried one by one on the same positions."""
    config = as_served(checkpoint.config, draft_tokens)
    weights = served_weights(checkpoint, precision)
    now = probe.acceptance(drafter_of(config, weights))
    around = Surroundings(facts.num_layers, facts.rope, special_tokens, probe.longest)
    variants = variants_of(config, around)
    report = progress.stage("known causes", len(variants) + min(FINALISTS, len(variants)))
    trials = try_variants(probe, weights, now, variants, report)
    repair = repair_of(trials)
    if repair is not None:
        whole = replace(repair.config, block_size=checkpoint.config.block_size)
        repair = replace(repair, config=whole)
    table = offline_table(now, draft_tokens)
    findings = findings_of(trials)
    if all(finding.gravity is Gravity.NOTE for finding in findings):
        findings += hardly_any(table.overall)
    return Examination(
        offline=table,
        tried=[_tried(trial) for trial in trials],
        findings=findings,
        repair=repair,
    )


def offline_table(texts: Sequence[TextAcceptance], draft_tokens: int) -> OfflineAcceptance:
    by_set: dict[str, list[TextAcceptance]] = {}
    by_context: dict[str, list[TextAcceptance]] = {}
    for text in texts:
        by_set.setdefault(text.prompt_set, []).append(text)
        by_context.setdefault(context_bucket(text.prompt_length), []).append(text)
    return OfflineAcceptance(
        overall=tabulate(texts, draft_tokens),
        by_set={name: tabulate(part, draft_tokens) for name, part in by_set.items()},
        by_context={
            name: tabulate(by_context[name], draft_tokens)
            for name in sorted(by_context, key=lambda name: int(name.split()[0]))
        },
    )


def context_bucket(length: int) -> str:
    """The name of the range of prompt lengths that this one falls into."""
    low = max(edge for edge in CONTEXT_EDGES if edge <= length)
    above = [edge for edge in CONTEXT_EDGES if edge > length]
    return f"{low} to {above[0] - 1}" if above else f"{low} and more"


def hardly_any(table: AcceptanceTable) -> list[Finding]:
    """No known cause, and yet next to nothing is accepted."""
    if table.length.high >= HARDLY_ANY:
        return []
    return [
        Finding(
            name="drafts-rejected",
            gravity=Gravity.UNFIT,
            message=(
                f"found an acceptance length of {table.length}, wanted at least {HARDLY_ANY}: "
                "hardly any draft is accepted, and none of the known causes explains it"
            ),
            evidence={"acceptance_length": table.length.value},
            remedy=(
                "The drafter was probably trained for another target, or hardly at all: train one "
                "for this target with `leadout data` and `leadout train`."
            ),
        )
    ]


def _tried(trial: Trial) -> Tried:
    gain = trial.gain
    return Tried(
        cause=trial.variant.cause,
        edit=trial.variant.edit,
        before=gain.before,
        after=gain.after,
        difference=gain.difference,
        texts=trial.texts,
    )
