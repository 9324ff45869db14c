"""What drafters accept along recorded requests: the same texts for each, so that they compare.

A recorded token stands for what the target would choose. On a greedy answer that is exact. On a
sampled one it is one draw: exact verification keeps a draft with the probability that the target
would have drawn it, and the draw that was recorded equals the draft with the same probability. So
the mean over many requests is that of serving, in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from leadout.checkpoints import load_drafter, read_checkpoint
from leadout.dflash.target import Observation, Target
from leadout.evaluate.acceptance import TextAcceptance, accepted_drafts, along_decoding
from leadout.evaluate.blocks import BlockForward, to_sequence
from leadout.evaluate.hidden_states import ComputedStates, Indexed, StateSource, load_model
from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.shards import Sample

Report = Callable[[], None]


def judge(
    target: Path,
    drafters: Sequence[Path],
    samples: Sequence[Sample],
    max_length: int,
    device: torch.device,
    report: Report = lambda: None,
) -> list[list[TextAcceptance]]:
    """For each drafter, what it accepts of every request; `report` is called after each request."""
    precision = read_checkpoint(drafters[0]).tensors.dtype
    model = load_model(target, precision).to(device)
    borrowed = load_target_weights(TargetFiles(target), precision, device)
    sources: dict[tuple[int, ...], StateSource] = {}
    judges = []
    for folder in drafters:
        drafter = load_drafter(folder, precision).to(device)
        taps = drafter.config.target_layer_ids
        sources.setdefault(taps, _Remembered(ComputedStates(_target_of(model, taps))))
        forward = BlockForward(drafter, borrowed.embedding)
        judges.append((forward, sources[taps], drafter.config.block_size, served_drafts(folder)))
    found: list[list[TextAcceptance]] = [[] for _ in drafters]
    for number, sample in enumerate(samples):
        item = (number, to_sequence(sample, max_length))
        for texts, (forward, source, size, most) in zip(found, judges, strict=True):
            (drafts,) = accepted_drafts(forward, borrowed, source, [item], size)
            counts = drafts.counts.clamp(max=most)
            texts.append(
                TextAcceptance(sample.source, len(sample.prompt), counts, along_decoding(counts))
            )
        report()
    return found


def served_drafts(drafter: Path) -> int:
    """K as `leadout serve` fills it in: what the file asks for, or all of the block."""
    checkpoint = read_checkpoint(drafter)
    return checkpoint.draft_tokens or checkpoint.config.max_draft_tokens


def _target_of(model: torch.nn.Module, taps: tuple[int, ...]) -> Callable[[], Target]:
    return lambda: Target(model, taps)


class _Remembered:
    """The states of the last request, which every drafter asks for in turn."""

    def __init__(self, source: StateSource) -> None:
        self._source = source
        self._number: int | None = None
        self._observed: Observation | None = None

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        ((number, _),) = sequences
        if self._observed is None or self._number != number:
            self._number, self._observed = number, self._source.observe(sequences)
        return self._observed
