"""Acceptance with its uncertainty: what the numbers of a few dozen prompts can say.

One definition for both sides. A decoding step accepts the leading drafts that the target agrees
with; acceptance length is tokens per step, the target's own included. Offline the steps are those
of a walk along the target's text; served, they are vLLM's counters. Prompts, not tokens, are drawn
again for the intervals: tokens of one text are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class TextAcceptance:
    """Of one text: drafts that stand at each position of its answer, and at each decoding step."""

    prompt_set: str
    prompt_length: int
    at_positions: Tensor  # [positions]
    at_steps: list[int]


class Interval(BaseModel):
    """A number with its 95% confidence interval."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


class AcceptanceTable(BaseModel):
    """Acceptance length of some texts, as one number and taken apart."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    texts: int
    steps: int
    length: Interval
    by_position: list[Interval]


def tabulate(texts: Sequence[TextAcceptance], draft_tokens: int) -> AcceptanceTable:
    steps = torch.tensor([len(text.at_steps) for text in texts], dtype=torch.float64)
    reached = torch.tensor(
        [
            [sum(count > place for count in text.at_steps) for place in range(draft_tokens)]
            for text in texts
        ],
        dtype=torch.float64,
    )  # [texts, K]
    return AcceptanceTable(
        texts=len(texts),
        steps=int(steps.sum()),
        length=_plus_one(ratio_interval(reached.sum(1), steps)),
        by_position=[ratio_interval(reached[:, place], steps) for place in range(draft_tokens)],
    )


def ratio_interval(parts: Tensor, wholes: Tensor) -> Interval:
    """Sum of parts over sum of wholes, both [texts], with a bootstrap interval over texts."""
    return bootstrap(
        len(parts), lambda draw: parts[draw].sum(-1) / wholes[draw].sum(-1).clamp(min=1)
    )


class Gain(BaseModel):
    """How much more one way of drafting accepts than another, on the same positions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    before: float  # accepted drafts and the target's token, mean over positions
    after: float
    difference: Interval

    @property
    def relative(self) -> float:
        return self.after / self.before - 1

    @property
    def is_significant(self) -> bool:
        return self.difference.low > 0


def paired_gain(before: Sequence[Tensor], after: Sequence[Tensor]) -> Gain:
    """Compare accepted drafts at the same positions of the same texts."""
    sizes = torch.tensor([len(each) for each in before], dtype=torch.float64)
    first = torch.tensor([each.sum().item() for each in before], dtype=torch.float64)
    second = torch.tensor([each.sum().item() for each in after], dtype=torch.float64)
    total = sizes.sum().clamp(min=1)
    return Gain(
        before=1 + (first.sum() / total).item(),
        after=1 + (second.sum() / total).item(),
        difference=ratio_interval(second - first, sizes),
    )


def bootstrap(count: int, statistic: Callable[[Tensor], Tensor]) -> Interval:
    """The statistic of all, and the middle 95% of its values over draws with repetition.

    `statistic` takes indices [..., count] and gives one number for each row.
    """
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(max(count, 1), (RESAMPLES, count), generator=generator)
    edge = (1 - LEVEL) / 2
    low, high = torch.quantile(statistic(draws), torch.tensor([edge, 1 - edge]).double()).tolist()
    return Interval(value=statistic(torch.arange(count)).item(), low=low, high=high)


def _plus_one(interval: Interval) -> Interval:
    return Interval(value=interval.value + 1, low=interval.low + 1, high=interval.high + 1)
