"""One pass of the target over some texts, and any drafter's acceptance along them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from leadout.check.hypotheses import Variant
from leadout.dflash.config import DrafterConfig
from leadout.dflash.drafter import Drafter
from leadout.dflash.target import Observation, Target
from leadout.evaluate.acceptance import (
    Gain,
    TextAcceptance,
    accepted_drafts,
    along_decoding,
    paired_gain,
)
from leadout.evaluate.blocks import BlockForward, TrainingSequence
from leadout.evaluate.hidden_states import ComputedStates, Indexed
from leadout.evaluate.target_weights import TargetFiles, TargetWeights, load_target_weights

Report = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's own greedy continuation."""

    prompt_set: str
    prompt: Sequence[int]
    answer: Sequence[int]


class Probe:
    """Texts with the target's states at every layer that a hypothesis may ask for.

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
        self._layer_ids = sorted(set(layer_ids))
        self.borrowed: TargetWeights = load_target_weights(
            TargetFiles(target), precision, torch.device("cpu")
        )
        source = ComputedStates(lambda: Target(model, self._layer_ids))
        self._sequences: list[Indexed] = []
        self._observed: list[Observation] = []
        for number, text in enumerate(texts):
            tokens = torch.tensor([*text.prompt, *text.answer])
            sequence = TrainingSequence(str(number), text.prompt_set, tokens, len(text.prompt))
            self._sequences.append((number, sequence))
            self._observed.append(source.observe([(number, sequence)]))
            report()

    @property
    def longest(self) -> int:
        return max(len(sequence) for _, sequence in self._sequences)

    def acceptance(self, drafter: Drafter) -> list[TextAcceptance]:
        """What the drafter accepts along every text."""
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
        every_text: int = 1,
        every_position: int = 1,
    ) -> list[Tensor]:
        """Accepted drafts by position of each text; of every text and position, or of fewer."""
        found = accepted_drafts(
            BlockForward(drafter, self.borrowed.embedding),
            self.borrowed,
            _ChosenTaps(self, drafter.config.target_layer_ids, normed_last_tap),
            self._sequences[::every_text],
            drafter.config.block_size,
            every_position,
        )
        return [each.counts for each in found]

    def states_of(
        self, number: int, layer_ids: Sequence[int], normed_last_tap: bool
    ) -> Observation:
        states, final = self._observed[number]
        width = final.shape[-1]
        parts = dict(zip(self._layer_ids, torch.split(states, width, dim=-1), strict=True))
        chosen = [parts[layer] for layer in layer_ids]
        if normed_last_tap:
            chosen[-1] = final
        return Observation(torch.cat(chosen, dim=-1), final)


class _ChosenTaps:
    """The probe's states as one drafter taps them."""

    def __init__(self, probe: Probe, layer_ids: Sequence[int], normed_last_tap: bool) -> None:
        self._probe = probe
        self._layer_ids = layer_ids
        self._normed_last_tap = normed_last_tap

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        ((number, _),) = sequences
        return self._probe.states_of(number, self._layer_ids, self._normed_last_tap)


@dataclass(frozen=True, slots=True)
class Trial:
    """What a variant would gain, and on how many texts that was measured."""

    variant: Variant
    gain: Gain
    texts: int


SCREEN_EVERY = 3  # of the texts, on which every variant is tried
FINALISTS = 6  # the variants that are tried on all texts
# Neighbouring positions share most of their drafts' fate: every second one tells as much.
EVERY_POSITION = 2


def try_variants(
    probe: Probe,
    weights: Mapping[str, Tensor],
    before: Sequence[TextAcceptance],
    variants: Sequence[Variant],
    report: Report = lambda: None,
) -> list[Trial]:
    """Every variant on the same positions as the drafter as it is: finalists, the best first.

    All are tried on some of the texts, the most promising again on all of them.
    """

    def trial(variant: Variant, every: int) -> Trial:
        changed = dict(weights) if variant.weights is None else variant.weights(weights)
        drafter = drafter_of(variant.config, changed)
        after = probe.counts(
            drafter,
            normed_last_tap=variant.normed_last_tap,
            every_text=every,
            every_position=EVERY_POSITION,
        )
        now = [each.at_positions[::EVERY_POSITION] for each in before[::every]]
        gain = paired_gain(now, after)
        report()
        return Trial(variant, gain, len(after))

    screened = _best_first(trial(variant, SCREEN_EVERY) for variant in variants)
    finalists = _best_first(trial(each.variant, 1) for each in screened[:FINALISTS])
    return [*finalists, *screened[FINALISTS:]]


def _best_first(trials: Iterable[Trial]) -> list[Trial]:
    """By the share gained: what the texts of a screening accept is not what all do."""
    return sorted(trials, key=lambda trial: -trial.gain.relative)


def drafter_of(config: DrafterConfig, weights: Mapping[str, Tensor]) -> Drafter:
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict(dict(weights), assign=True)
    return drafter
