"""Tokens per step by K, with intervals over prompts.

Every request gains the same number of tokens, so texts that draft well do not count for more; and
every prompt is answered with every K, so that draws of prompts compare the same texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leadout.engine.calibration import RoundResult
from leadout.tune.monotone import never_falling
from leadout.tune.sampled import Sampled, multiplicities


@dataclass(frozen=True, slots=True)
class Accepted:
    tokens: Mapping[int, Sampled]  # by K
    by_position: Sequence[Sampled]  # of the largest K: share of steps whose first n drafts stand
    requests: int
    steps: int


def fit_acceptance(rounds: Sequence[RoundResult]) -> Accepted:
    prompts = sorted({gained.prompt for each in rounds for gained in each.gained})
    counts = multiplicities(len(prompts), seed=1)
    drafting = [each for each in rounds if each.k]
    lengths = sorted({each.k for each in drafting})

    def mean(k: int, of_step: Callable[[int], float]) -> tuple[Tensor, Tensor]:
        """Of something of a step's tokens, over all steps with this K, and how many they are."""
        sums, steps = torch.zeros(2, len(prompts), dtype=torch.float64)
        for each in (each for each in drafting if each.k == k):
            for gained in each.gained:
                place = prompts.index(gained.prompt)
                sums[place] += sum(map(of_step, gained.tokens))
                steps[place] += len(gained.tokens)
        drawn = counts @ steps
        return counts @ sums / drawn.clamp(min=1), drawn

    found = [mean(k, float) for k in lengths]
    values, weights = (torch.stack(columns, dim=1) for columns in zip(*found, strict=True))
    tokens = zip(lengths, never_falling(values, weights).T, strict=True)

    return Accepted(
        tokens={0: Sampled.exactly(1.0), **{k: Sampled(column) for k, column in tokens}},
        by_position=[
            Sampled(mean(lengths[-1], _reaches(position))[0])
            for position in range(1, lengths[-1] + 1)
        ],
        requests=sum(len(each.gained) for each in drafting),
        steps=sum(len(gained.tokens) for each in drafting for gained in each.gained),
    )


def _reaches(position: int) -> Callable[[int], float]:
    """Whether the drafts up to a position, from 1, all stand in a step of so many tokens."""
    return lambda tokens: float(tokens > position)
