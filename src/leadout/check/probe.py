"""Acceptance of any drafter along fixed texts, and trials of variants of one drafter on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from leadout.check.hypotheses import Variant
from leadout.dflash.config import DrafterConfig
from leadout.dflash.drafter import Drafter
from leadout.evaluate.acceptance import (
    Gain,
    TextAcceptance,
    accepted_drafts,
    along_decoding,
    paired_gain,
)
from leadout.evaluate.blocks import BlockForward, TrainingSequence
from leadout.evaluate.compare import SharedStates
from leadout.evaluate.hidden_states import Indexed
from leadout.evaluate.target_weights import TargetFiles, load_target_weights

Report = Callable[[], None]

SCREEN_EVERY = 3  # every third text is used to screen all variants
FINALISTS = 6  # variants that are tried on all texts
# Acceptance at neighbouring positions is correlated: every second position carries about as much
# information as all of them.
POSITION_STRIDE = 2


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's own greedy continuation."""

    prompt_set: str
    prompt: Sequence[int]
    answer: Sequence[int]


class Probe:
    """Texts with the target's states at every layer that a drafter may tap.

    `model` is the target in transformers, in this precision.
    """

    def __init__(
        self,
        target: Path,
        model: nn.Module,
        texts: Sequence[Text],
        layer_ids: Iterable[int],
        precision: torch.dtype,
        report: Report = lambda: None,
    ) -> None:
        self._texts = texts
        self._weights = load_target_weights(TargetFiles(target), precision, torch.device("cpu"))
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
        found = self.counts(drafter)
        return [
            TextAcceptance(text.prompt_set, len(text.prompt), counts, along_decoding(counts))
            for text, counts in zip(self._texts, found, strict=True)
        ]

    def counts(
        self,
        drafter: Drafter,
        *,
        normed_last_tap: bool = False,
        text_stride: int = 1,
        position_stride: int = 1,
    ) -> list[Tensor]:
        """Accepted drafts [positions] of each text; a stride skips texts or positions."""
        taps = drafter.config.target_layer_ids
        found = accepted_drafts(
            BlockForward(drafter, self._weights.embedding),
            self._weights,
            self.states.tapped_at(taps, normed_last_tap=normed_last_tap),
            self.sequences[::text_stride],
            drafter.config.block_size,
            position_stride,
        )
        return [each.counts for each in found]


@dataclass(frozen=True, slots=True)
class Trial:
    """The gain of a variant over the drafter as it is."""

    variant: Variant
    gain: Gain
    texts: int  # that it was measured on


def try_variants(
    probe: Probe,
    weights: Mapping[str, Tensor],
    before: Sequence[TextAcceptance],
    variants: Sequence[Variant],
    report: Report = lambda: None,
) -> list[Trial]:
    """Try every variant on the same positions as the drafter as it is; the best comes first.

    All variants are screened on some of the texts, and the best of them are tried on all texts.
    """

    def trial(variant: Variant, stride: int) -> Trial:
        changed = dict(weights) if variant.weights is None else variant.weights(weights)
        after = probe.counts(
            drafter_of(variant.config, changed),
            normed_last_tap=variant.normed_last_tap,
            text_stride=stride,
            position_stride=POSITION_STRIDE,
        )
        now = [each.at_positions[::POSITION_STRIDE] for each in before[::stride]]
        gain = paired_gain(now, after)
        report()
        return Trial(variant, gain, len(after))

    screened = _best_first(trial(variant, SCREEN_EVERY) for variant in variants)
    finalists = _best_first(trial(each.variant, 1) for each in screened[:FINALISTS])
    return [*finalists, *screened[FINALISTS:]]


def _best_first(trials: Iterable[Trial]) -> list[Trial]:
    """By relative gain, which is comparable between different selections of texts."""
    return sorted(trials, key=lambda trial: -trial.gain.relative)


def drafter_of(config: DrafterConfig, weights: Mapping[str, Tensor]) -> Drafter:
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict(dict(weights), assign=True)
    return drafter
