"""Offline acceptance of a drafter, the cause if it is too low, and the repaired drafter.

The drafter is evaluated as the engine serves it: with the block cut to K slots after the anchor,
and with the taps ordered by depth, whatever their order in the file. Every known cause of rejected
drafts is then undone in turn on the same positions (`leadout.check.trials`); a cause whose undoing
raises acceptance is a finding, with the exact edit as its remedy.

An acceptance length that is known too imprecisely decides nothing: `precision_findings`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from leadout.check.hypotheses import TargetInfo, Variant, variants_of
from leadout.check.result import (
    TOO_FEW_TEXTS,
    CheckError,
    OfflineAcceptance,
    TextFigures,
    Tried,
)
from leadout.check.trials import FINALISTS, Trial, findings_of, repair_of, screen_and_test
from leadout.checkpoints import Checkpoint, load_weights, read_checkpoint, write_checkpoint
from leadout.checkpoints.store import refuse_existing
from leadout.console import Progress
from leadout.data.chat import Chat, TemplateError
from leadout.data.prompt_record import prompt_hash
from leadout.dflash.config import DrafterConfig
from leadout.dflash.drafter import Drafter
from leadout.evaluate.acceptance import (
    AcceptanceTable,
    DraftHead,
    Gain,
    TextAcceptance,
    accepted_drafts,
    along_decoding,
    lengths_by_draft_tokens,
    paired_gain,
    tabulate,
)
from leadout.evaluate.blocks import BlockForward, TrainingSequence
from leadout.evaluate.hidden_states import Indexed, ReferenceTarget, SharedStates
from leadout.evaluate.prompts import prompts_or_default
from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.findings import Finding, Severity, error, warning
from leadout.pairing import TargetFacts
from leadout.stats import Interval

# Below this acceptance length drafting costs more than it brings on any engine.
MIN_ACCEPTANCE = 1.15

CONTEXT_EDGES = (0, 128, 256, 512, 1024, 2048, 4096)

# An acceptance length whose interval is wider, relative to its value, decides nothing.
MAX_HALF_WIDTH = 0.1
MIN_TEXTS = 10  # a bootstrap interval over fewer texts is too narrow
# Acceptance at neighbouring positions is correlated: every second position carries about as much
# information as all of them.
POSITION_STRIDE = 2

PLAIN = "without the chat template"
THINKING = {True: "with thinking", False: "without thinking"}
PROMPTS_PER_MODE = 9  # over all sets


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's own greedy continuation."""

    prompt_set: str
    prompt: Sequence[int]
    answer: Sequence[int]


class Probe:
    """Texts with the target's states at every layer that a drafter may tap.

    `model` is the target in this precision.
    """

    def __init__(
        self,
        target: Path,
        model: nn.Module | ReferenceTarget,
        texts: Sequence[Text],
        layer_ids: Iterable[int],
        precision: torch.dtype,
        report: Callable[[], None] = lambda: None,
        device: torch.device | None = None,
    ) -> None:
        self._texts = texts
        self._device = device or torch.device("cpu")
        self._weights = load_target_weights(TargetFiles(target), precision, self._device)
        self.states = SharedStates(model, layer_ids, keep_all=True)
        self.sequences: list[Indexed] = []
        for number, text in enumerate(texts):
            tokens = torch.tensor([*text.prompt, *text.answer])
            sequence = TrainingSequence(str(number), text.prompt_set, tokens, len(text.prompt))
            self.sequences.append((number, sequence))
            self.states.observe((number, sequence))
            report()

    @property
    def longest(self) -> int:
        """Length of the longest text in tokens."""
        return max(len(sequence) for _, sequence in self.sequences)

    def acceptance(self, drafter: Drafter) -> list[TextAcceptance]:
        """The drafter's acceptance along every text."""
        return [
            TextAcceptance(
                text.prompt_set,
                len(text.prompt),
                counts,
                along_decoding(counts),
                f"{prompt_hash(text.prompt):016x}",
            )
            for text, counts in zip(self._texts, self.counts(drafter), strict=True)
        ]

    def counts(
        self,
        drafter: Drafter,
        *,
        normed_last_tap: bool = False,
        texts: Sequence[int] | None = None,
        position_stride: int = 1,
    ) -> list[Tensor]:
        """Accepted drafts [positions] of all texts or of these; a stride skips positions."""
        taps = drafter.config.target_layer_ids
        found = accepted_drafts(
            BlockForward(drafter.to(self._device), self._weights.embedding),
            DraftHead.of(drafter, self._weights),
            self.states.tapped_at(taps, normed_last_tap=normed_last_tap),
            self.sequences if texts is None else [self.sequences[i] for i in texts],
            drafter.config.block_size,
            position_stride,
        )
        return [each.counts for each in found]


def try_variants(
    probe: Probe,
    weights: Mapping[str, Tensor],
    before: Sequence[TextAcceptance],
    variants: Sequence[Variant],
    report: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """Screen and test variants at the same positions as the drafter as it is; the best first."""

    def gain_on(variant: Variant, texts: Sequence[int]) -> Gain:
        changed = dict(weights) if variant.weights is None else variant.weights(weights)
        after = probe.counts(
            drafter_of(variant.config, changed),
            normed_last_tap=variant.normed_last_tap,
            texts=texts,
            position_stride=POSITION_STRIDE,
        )
        now = [before[i].at_positions[::POSITION_STRIDE] for i in texts]
        report()
        return paired_gain(now, after)

    return screen_and_test(variants, gain_on, len(before))


def drafter_of(config: DrafterConfig, weights: Mapping[str, Tensor]) -> Drafter:
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict(dict(weights), assign=True)
    return drafter


@dataclass(frozen=True, slots=True)
class Diagnosis:
    offline: OfflineAcceptance
    tried: list[Tried]
    findings: list[Finding]
    repair: Variant | None  # with the drafter's own block size


def diagnose(
    probe: Probe,
    facts: TargetFacts,
    checkpoint: Checkpoint,
    draft_tokens: int,
    mask_candidates: Sequence[int],
    precision: torch.dtype,
    progress: Progress,
) -> Diagnosis:
    """Measure acceptance, then undo every known cause in turn on the same positions."""
    config = as_served(checkpoint.config, draft_tokens)
    weights = served_weights(checkpoint, precision)
    acceptance = probe.acceptance(drafter_of(config, weights))
    target = TargetInfo(facts.num_layers, facts.rope, mask_candidates, probe.longest)
    variants = variants_of(config, target)
    most_tests = min(FINALISTS, len(variants))
    report = progress.stage("known causes", len(variants) + most_tests)
    trials = try_variants(probe, weights, acceptance, variants, report)
    report(most_tests - sum(trial.p_value is not None for trial in trials))
    repair = repair_of(trials)
    if repair is not None:
        whole_block = replace(repair.config, block_size=checkpoint.config.block_size)
        repair = replace(repair, config=whole_block)
    table = offline_table(acceptance, draft_tokens)
    findings = cause_findings(trials, table.overall)
    tried = [
        Tried(
            cause=trial.variant.cause,
            edit=trial.variant.edit,
            before=trial.gain.before,
            after=trial.gain.after,
            difference=trial.gain.difference,
            texts=trial.texts,
            p_value=trial.p_value,
        )
        for trial in trials
    ]
    return Diagnosis(table, tried, findings, repair)


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


def layers_needed(config: DrafterConfig, target_layers: int) -> set[int]:
    """Every layer that a variant of this drafter may tap."""
    near = {i + shift for i in config.target_layer_ids for shift in (-1, 0, 1)}
    return {layer for layer in near if 0 <= layer < target_layers}


def cause_findings(trials: Sequence[Trial], table: AcceptanceTable) -> list[Finding]:
    """The causes that were found; without any, whether drafts are accepted at all."""
    findings = findings_of(trials)
    if all(each.severity is Severity.NOTE for each in findings):
        findings += acceptance_findings(table)
    return findings


def acceptance_findings(table: AcceptanceTable) -> list[Finding]:
    """Hardly any draft is accepted, although no known cause was found."""
    if table.length.high >= MIN_ACCEPTANCE:
        return []
    message = (
        f"the acceptance length is {table.length:.3f}, below {MIN_ACCEPTANCE}: hardly any draft is "
        "accepted, and none of the known causes explains it"
    )
    remedy = (
        "The drafter was probably trained for another target, or hardly at all: train one for this "
        "target with `leadout data` and `leadout train`."
    )
    return [error("drafts-rejected", message, remedy, acceptance_length=table.length.value)]


def half_width(interval: Interval) -> float:
    """Half of the interval's width, relative to its value."""
    return (interval.high - interval.low) / 2 / interval.value


def precision_findings(table: AcceptanceTable, sets: int, per_set: int | None) -> list[Finding]:
    """Too few texts to know the acceptance length; `per_set` is the limit set by --texts."""
    length = table.length
    width = half_width(length)
    if width <= MAX_HALF_WIDTH and table.texts >= MIN_TEXTS:
        return []
    # The width of an interval falls with the square root of the number of texts.
    needed = table.texts * (width / MAX_HALF_WIDTH) ** 2
    enough = max(MIN_TEXTS, math.ceil(needed))
    texts = "1 text" if table.texts == 1 else f"{table.texts} texts"
    if width > MAX_HALF_WIDTH:
        problem = (
            f"the acceptance length on {texts} is {length:.2f}: its 95% interval is "
            f"±{width:.0%}, wider than ±{MAX_HALF_WIDTH:.0%}"
        )
    else:
        problem = f"a 95% interval of the acceptance length needs more than {texts}"
    remedy = f"Give at least {enough} prompts like your traffic with --prompts FILE."
    if per_set is not None:
        remedy = (
            f"Use --texts {math.ceil(enough / sets)} or more, with as many prompts in each set."
        )
    return [
        warning(
            TOO_FEW_TEXTS,
            f"{problem}; about {enough} texts would be enough",
            remedy,
            texts=table.texts,
            enough=enough,
            half_width=width,
        )
    ]


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
        by_draft_tokens=lengths_by_draft_tokens(texts, draft_tokens),
        texts=[
            TextFigures(
                prompt=text.prompt,
                prompt_set=text.prompt_set,
                steps=len(text.at_steps),
                tokens=len(text.at_steps) + sum(text.at_steps),
            )
            for text in texts
        ],
    )


def context_bucket(length: int) -> str:
    """The name of the range that a prompt length falls into, such as "128 to 255"."""
    low = max(edge for edge in CONTEXT_EDGES if edge <= length)
    above = [edge for edge in CONTEXT_EDGES if edge > length]
    return f"{low} to {above[0] - 1}" if above else f"{low} and more"


def write_repaired(
    drafter: Path, repair: Variant, out: Path, target_layers: int | None = None
) -> Checkpoint:
    """Write the drafter with the repair's edit, in the same format, into a new folder.

    `target_layers` fills in a missing number of target layers. The training record is not copied:
    it describes another drafter.
    """
    if repair.normed_last_tap:
        raise CheckError(
            f"--fix cannot repair {repair.cause} ({repair.edit}): no field or tensor of the "
            "drafter's files decides it. Train the drafter on the states that vLLM provides."
        )
    refuse_existing(out)
    checkpoint = read_checkpoint(drafter)
    weights = load_weights(checkpoint)
    if repair.weights is not None:
        weights = repair.weights(weights)
    config = repair.config
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


def other_modes(
    files: Sequence[str], target: Path, chat: Chat, max_tokens: int
) -> dict[str, list[list[int]]]:
    """Some prompts without the chat template and in the other thinking mode.

    Modes whose tokens are those of `chat` are left out.
    """
    prompts = prompts_or_default(files)
    some = prompts[:: max(1, len(prompts) // PROMPTS_PER_MODE)][:PROMPTS_PER_MODE]
    asked = [chat.prompt(prompt.turns[:1]) for prompt in some]
    modes = {PLAIN: [chat.plain(prompt.text) for prompt in some]}
    for thinking, name in THINKING.items():
        try:
            other = Chat(target, thinking)
        except TemplateError:
            break  # the template has no thinking modes
        modes[name] = [other.prompt(prompt.turns[:1]) for prompt in some]
    return {
        name: [prompt for prompt in tokens if len(prompt) <= max_tokens]
        for name, tokens in modes.items()
        if tokens != asked
    }


def mode_findings(
    target: Path,
    model: nn.Module | ReferenceTarget,
    checkpoint: Checkpoint,
    draft_tokens: int,
    answers: Mapping[str, Sequence[Text]],
    offline: OfflineAcceptance,
    precision: torch.dtype,
    device: torch.device | None = None,
) -> list[Finding]:
    """Modes with significantly higher acceptance: the drafter was trained for one of them."""
    config = as_served(checkpoint.config, draft_tokens)
    drafter = drafter_of(config, served_weights(checkpoint, precision))
    here = offline.overall.length
    findings = []
    for mode, texts in answers.items():
        long_enough = [text for text in texts if len(text.answer) > draft_tokens]
        if not long_enough:
            continue
        taps = config.target_layer_ids
        probe = Probe(target, model, long_enough, taps, precision, device=device)
        there = tabulate(probe.acceptance(drafter), draft_tokens).length
        if there.low > here.high:
            findings.append(
                warning(
                    "asked-in-another-mode",
                    f"the acceptance length is {there:.3f} {mode}, but {here:.3f} in the mode of "
                    "this check: the drafter was trained on text of the other mode",
                    f"Serve the target {mode}, or train the drafter as it is served.",
                    mode=mode,
                    there=there.value,
                    here=here.value,
                )
            )
    return findings
