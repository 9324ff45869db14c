"""A drafter with a cause undone, written as a checkpoint of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from leadout.check.hypotheses import HYPOTHESES, Hypothesis, Surroundings, Variant
from leadout.check.probe import FINALISTS, Probe, Text, Trial, drafter_of, try_variants
from leadout.check.result import (
    CheckError,
    Evidence,
    Finding,
    Gravity,
    OfflineAcceptance,
    Progress,
    Tried,
)
from leadout.checkpoints import Checkpoint, load_weights, read_checkpoint, write_checkpoint
from leadout.checkpoints.store import refuse_existing
from leadout.data.chat import Chat, TemplateError
from leadout.dflash.config import DrafterConfig
from leadout.evaluate.acceptance import AcceptanceTable, TextAcceptance, tabulate
from leadout.evaluate.prompts import prompts_or_default
from leadout.pairing import TargetFacts


class NotFixableError(CheckError):
    """A cause that no edit of the drafter's files can undo."""


def write_fixed(
    drafter: Path, variant: Variant, out: Path, target_layers: int | None = None
) -> Checkpoint:
    """The checkpoint in `drafter` with the variant's edit, in the same format, in a new folder.

    `target_layers` completes a file that does not tell them. The record of its training is not
    copied: it describes another drafter.
    """
    if variant.normed_last_tap:
        raise NotFixableError(
            f"--fix: found the cause {variant.cause} ({variant.edit}), wanted one that a field or "
            "a tensor of the drafter decides: no format can say this; train the drafter on the "
            "states that vLLM hands over"
        )
    refuse_existing(out)
    checkpoint = read_checkpoint(drafter)
    weights = load_weights(checkpoint)
    if variant.weights is not None:
        weights = variant.weights(weights)
    config = variant.config
    if config.target_num_layers is None:
        config = replace(config, target_num_layers=target_layers)
    write_checkpoint(
        out,
        weights,
        config,
        checkpoint.format,
        target_name=checkpoint.target_name,
        draft_tokens=checkpoint.draft_tokens,
        kept=checkpoint.kept,
    )
    return read_checkpoint(out)


# Which known cause, undone, would raise acceptance: named with numbers and the exact edit.

# Gains below this are not worth an edit, significant or not.
SMALLEST_GAIN = 0.01
# A better setting explains a drafter that hardly works only if it brings most of it back.
GRAVE_GAIN = 0.25


def variants_of(
    config: DrafterConfig, around: Surroundings, hypotheses: Sequence[Hypothesis] = HYPOTHESES
) -> list[Variant]:
    return [variant for each in hypotheses for variant in each.variants(config, around)]


def layers_needed(config: DrafterConfig, target_layers: int) -> set[int]:
    """Every layer that a hypothesis may tap."""
    near = {i + shift for i in config.target_layer_ids for shift in (-1, 0, 1)}
    return {layer for layer in near if 0 <= layer < target_layers}


def findings_of(trials: Sequence[Trial]) -> list[Finding]:
    """One finding for each cause whose undoing raises acceptance, the largest gain first."""
    found: dict[str, Finding] = {}
    whole = max((trial.texts for trial in trials), default=0)
    for trial in trials:  # the best first
        if trial.texts < whole:
            continue  # only screened: few texts make large gains by chance
        cause = trial.variant.cause
        gain = trial.gain
        if cause in found or not gain.is_significant or gain.relative < SMALLEST_GAIN:
            continue
        found[cause] = Finding(
            name=cause,
            gravity=_gravity(trial),
            message=(
                f"{trial.variant.edit} raises acceptance from {gain.before:.3f} to "
                f"{gain.after:.3f} on the same positions ({gain.relative:+.1%})"
            ),
            evidence=_evidence(trial),
            remedy=f"Make this edit, or let --fix write it: {trial.variant.edit}.",
        )
    return list(found.values())


def repair_of(trials: Sequence[Trial]) -> Variant | None:
    """The variant to write: the best one that is no mere note, if it gains enough."""
    for trial in trials:  # the best first
        if _gravity(trial) is not Gravity.NOTE:
            enough = trial.gain.is_significant and trial.gain.relative >= SMALLEST_GAIN
            return trial.variant if enough else None
    return None


def _gravity(trial: Trial) -> Gravity:
    if trial.gain.relative >= GRAVE_GAIN:
        return Gravity.UNFIT
    return Gravity.NOTE if trial.variant.may_be_meant else Gravity.DOUBTFUL


def _evidence(trial: Trial) -> Evidence:
    gain = trial.gain
    return {
        "before": gain.before,
        "after": gain.after,
        "gain": gain.difference.value,
        "gain_low": gain.difference.low,
        "gain_high": gain.difference.high,
        "edit": trial.variant.edit,
    }


# The reference's half of a check: acceptance along the target's texts, and what would raise it.
#
# The drafter is taken as the engine serves it: with the block cut to K slots after the anchor, and
# with the taps in the order of depth, whatever the order in the file.

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


# Other ways to ask: without the chat template, or in the other thinking mode.
#
# A drafter knows the text it was trained on. If it accepts clearly more when the target is asked in
# another way, it was trained for that way, and the pair is served in the wrong one.

PLAIN = "without the chat template"
THINKING = {True: "with thinking", False: "without thinking"}
PROMPTS = 9  # of each mode, over all sets


def other_modes(
    sources: Sequence[str], target: Path, chat: Chat, max_prompt: int
) -> dict[str, list[list[int]]]:
    """A few of the prompts in every way of asking that gives other tokens than `chat` does."""
    prompts = prompts_or_default(sources)
    some = prompts[:: max(1, len(prompts) // PROMPTS)][:PROMPTS]
    asked = [chat.prompt(prompt.turns[:1]) for prompt in some]
    modes = {PLAIN: [chat.plain(prompt.turns[0]) for prompt in some]}
    for thinking, name in THINKING.items():
        try:
            other = Chat(target, thinking)
        except TemplateError:
            break  # the template knows no modes
        modes[name] = [other.prompt(prompt.turns[:1]) for prompt in some]
    return {
        name: [prompt for prompt in tokens if len(prompt) <= max_prompt]
        for name, tokens in modes.items()
        if tokens != asked
    }


def mode_findings(
    target: Path,
    model: nn.Module,
    checkpoint: Checkpoint,
    draft_tokens: int,
    answers: Mapping[str, Sequence[Text]],
    offline: OfflineAcceptance,
    precision: torch.dtype,
) -> list[Finding]:
    """One finding for each mode in which the drafter accepts clearly more."""
    config = as_served(checkpoint.config, draft_tokens)
    drafter = drafter_of(config, served_weights(checkpoint, precision))
    now = offline.overall.length
    findings = []
    for mode, texts in answers.items():
        long_enough = [text for text in texts if len(text.answer) > draft_tokens]
        if not long_enough:
            continue
        probe = Probe(target, model, long_enough, config.target_layer_ids, precision)
        length = tabulate(probe.acceptance(drafter), draft_tokens).length
        if length.low > now.high:
            findings.append(
                Finding(
                    name="asked-in-another-mode",
                    gravity=Gravity.DOUBTFUL,
                    message=(
                        f"the drafter accepts {length} {mode}, but {now} as it is asked now: it "
                        "was trained on text of that kind"
                    ),
                    evidence={"mode": mode, "there": length.value, "here": now.value},
                    remedy=f"Serve the target {mode}, or train the drafter as it is served.",
                )
            )
    return findings
