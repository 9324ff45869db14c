"""Acceptance of several drafters along the same texts, from one pass of the target over each.

A recorded token takes the place of what the target would choose. On a greedy answer that is exact.
On a sampled answer it is one draw: exact verification accepts a draft with the probability that
the target would have drawn it, and the recorded draw equals the draft with the same probability.
The mean over many requests is therefore that of serving in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from leadout.checkpoints import load_drafter, read_checkpoint
from leadout.dflash.target import Observation, Target
from leadout.evaluate.acceptance import TextAcceptance, accepted_drafts, along_decoding
from leadout.evaluate.blocks import BlockForward, to_sequence
from leadout.evaluate.hidden_states import ComputedStates, Indexed, StateSource, load_model
from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.shards import Sample


def acceptance_by_drafter(
    target: Path,
    drafters: Sequence[Path],
    samples: Sequence[Sample],
    max_length: int,
    device: torch.device,
    report: Callable[[], None] = lambda: None,
) -> list[list[TextAcceptance]]:
    """For each drafter, its acceptance on every sample; `report` is called after each sample."""
    precision = read_checkpoint(drafters[0]).tensors.dtype
    weights = load_target_weights(TargetFiles(target), precision, device)
    forwards = [
        BlockForward(load_drafter(folder, precision).to(device), weights.embedding)
        for folder in drafters
    ]
    max_drafts = [served_draft_tokens(folder) for folder in drafters]
    layer_ids = {layer for each in forwards for layer in each.drafter.config.target_layer_ids}
    states = SharedStates(load_model(target, precision).to(device), layer_ids, keep_all=False)
    found: list[list[TextAcceptance]] = [[] for _ in drafters]
    for number, sample in enumerate(samples):
        item = (number, to_sequence(sample, max_length))
        for texts, forward, limit in zip(found, forwards, max_drafts, strict=True):
            config = forward.drafter.config
            source = states.tapped_at(config.target_layer_ids)
            (drafts,) = accepted_drafts(forward, weights, source, [item], config.block_size)
            counts = drafts.counts.clamp(max=limit)
            texts.append(
                TextAcceptance(sample.source, len(sample.prompt), counts, along_decoding(counts))
            )
        report()
    return found


def served_draft_tokens(drafter: Path) -> int:
    """The K that `leadout serve` uses by default: that of the checkpoint, or the whole block."""
    checkpoint = read_checkpoint(drafter)
    return checkpoint.draft_tokens or checkpoint.config.max_draft_tokens


class SharedStates:
    """The target's states at every layer that any of several drafters taps.

    Each text is read once by the target, whatever the number of drafters. With `keep_all` the
    states of all texts stay in memory, otherwise those of the last one.
    """

    def __init__(self, model: nn.Module, layer_ids: Iterable[int], *, keep_all: bool) -> None:
        self.layer_ids = sorted(set(layer_ids))
        self._source = ComputedStates(lambda: Target(model, self.layer_ids))
        self._keep_all = keep_all
        self._kept: dict[int, Observation] = {}

    def observe(self, item: Indexed) -> Observation:
        """States [1, length, layers * H] and final states [1, length, H] of one text."""
        number, _ = item
        if number not in self._kept:
            if not self._keep_all:
                self._kept.clear()
            self._kept[number] = self._source.observe([item])
        return self._kept[number]

    def tapped_at(self, layer_ids: Sequence[int], *, normed_last_tap: bool = False) -> StateSource:
        """The states as a drafter with these taps reads them.

        With `normed_last_tap` the last tap is the final state after the target's final norm.
        """
        return _Taps(self, layer_ids, normed_last_tap)


class _Taps:
    def __init__(self, shared: SharedStates, layer_ids: Sequence[int], normed: bool) -> None:
        self._shared = shared
        self._layer_ids = layer_ids
        self._normed_last_tap = normed

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        (item,) = sequences
        states, final = self._shared.observe(item)
        parts = torch.split(states, final.shape[-1], dim=-1)
        by_layer = dict(zip(self._shared.layer_ids, parts, strict=True))
        taps = [by_layer[layer] for layer in self._layer_ids]
        if self._normed_last_tap:
            taps[-1] = final
        return Observation(torch.cat(taps, dim=-1), final)
