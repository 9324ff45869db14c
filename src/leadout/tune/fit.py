"""From timed steps to the additive law of a step: what verifying costs, and what drafting costs.

    step(drafts verified v, drafted k) = verify[v] + draft[k],    verify[0] = a bare step

The unit is the bare step of the same turn, so that a slow second of the machine cancels. Each cell
(v, k) is its median, which a few disturbed steps do not move; the law goes through the medians by
least squares, each as heavy as its number of steps, and never falls. Turns are drawn again for the
intervals.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leadout.control.tuned import PrefillLaw
from leadout.engine.calibration import Prefill, Turn
from leadout.tune.monotone import never_falling
from leadout.tune.request import TuneError
from leadout.tune.sampled import Sampled, multiplicities

Cell = tuple[int, int]  # drafts verified, drafted


@dataclass(frozen=True, slots=True)
class StepLaw:
    """Costs at one batch size, in bare steps; `bare` is one in seconds."""

    bare: Sampled
    verify: Mapping[int, Sampled]
    draft: Mapping[int, Sampled]

    def step(self, k: int) -> Sampled:
        """A step that verifies k drafts and drafts k again."""
        return self.verify[k] + self.draft[k]


def fit_steps(turns: Sequence[Turn], seed: int = 0) -> StepLaw:
    whole = [turn for turn in turns if turn.bare and turn.steps]
    if not whole:
        raise TuneError(
            "calibration: found no turn in which both engines decoded a full batch, wanted some; "
            "lower --max-batch, or give shorter --prompts"
        )
    counts = multiplicities(len(whole), seed)
    cells: dict[Cell, list[tuple[int, float]]] = defaultdict(list)
    bare: list[tuple[int, float]] = []
    for number, turn in enumerate(whole):
        reference = statistics.median(turn.bare)
        bare += [(number, seconds) for seconds in turn.bare]
        for step in turn.steps:
            cells[step.verified, step.drafted].append((number, step.seconds / reference))
    medians = {cell: weighted_median(found, counts) for cell, found in cells.items()}
    weights = {cell: _counted(found, counts) for cell, found in cells.items()}
    verify, draft = _additive(medians, weights)
    return StepLaw(Sampled(weighted_median(bare, counts)), verify, draft)


def weighted_median(values: Sequence[tuple[int, float]], counts: Tensor) -> Tensor:
    """Of (unit, value) pairs, for every row of how often each unit counts; 0 where none does."""
    units, sorted_values = _columns(sorted(values, key=lambda pair: pair[1]))
    running = counts[:, units].cumsum(1)
    half = running[:, -1:] / 2
    last = len(values) - 1
    low = (running < half).sum(1).clamp(max=last)
    high = (running <= half).sum(1).clamp(max=last)
    middle = (sorted_values[low] + sorted_values[high]) / 2
    return torch.where(half[:, 0] > 0, middle, torch.zeros_like(middle))


def _counted(values: Sequence[tuple[int, float]], counts: Tensor) -> Tensor:
    units, _ = _columns(values)
    return counts[:, units].sum(1)


def _columns(values: Sequence[tuple[int, float]]) -> tuple[Tensor, Tensor]:
    units = torch.tensor([unit for unit, _ in values])
    return units, torch.tensor([value for _, value in values], dtype=torch.float64)


def _additive(
    medians: Mapping[Cell, Tensor], weights: Mapping[Cell, Tensor]
) -> tuple[dict[int, Sampled], dict[int, Sampled]]:
    """Weighted least squares of verify[v] + draft[k] through the cells, in every draw."""
    verified = sorted({v for v, _ in medians} - {0})
    drafted = sorted({k for _, k in medians})
    place = {("verify", v): number for number, v in enumerate(verified)}
    place |= {("draft", k): len(verified) + number for number, k in enumerate(drafted)}
    cells = list(medians)
    design = torch.zeros(len(cells), len(place), dtype=torch.float64)
    for row, (v, k) in enumerate(cells):
        design[row, place["draft", k]] = 1
        if v:
            design[row, place["verify", v]] = 1
    measured = torch.stack([medians[v, k] - float(v == 0) for v, k in cells], dim=1)
    weight = torch.stack([weights[cell] for cell in cells], dim=1)
    weighted = weight.unsqueeze(2) * design
    normal = design.T @ weighted
    # A draw may leave out all steps of a cell; what it says nothing of stays near zero.
    normal = normal + 1e-9 * torch.eye(len(place), dtype=torch.float64)
    found = torch.linalg.solve(normal, (weighted * measured.unsqueeze(2)).sum(1))
    heavy = weighted.sum(1)  # steps behind each unknown

    def curve(name: str, at: Sequence[int], least: float) -> dict[int, Sampled]:
        columns = [place[name, each] for each in at]
        rising = never_falling(found[:, columns], heavy[:, columns]).clamp(min=least)
        return {each: Sampled(column) for each, column in zip(at, rising.T, strict=True)}

    # Verifying drafts never makes a step shorter, and drafting never costs less than nothing.
    verify = curve("verify", verified, 1.0) if verified else {}
    return {0: Sampled.exactly(1.0), **verify}, curve("draft", drafted, 0.0)


def fit_prefill(steps: Sequence[Prefill]) -> PrefillLaw:
    """A line by the median of all slopes between two steps (Theil and Sen)."""
    slopes = [
        (b.seconds - a.seconds) / (b.tokens - a.tokens)
        for number, a in enumerate(steps)
        for b in steps[number + 1 :]
        if a.tokens != b.tokens
    ]
    per_token = max(statistics.median(slopes), 0.0) if slopes else 0.0
    rest = [step.seconds - per_token * step.tokens for step in steps]
    return PrefillLaw(base=max(statistics.median(rest), 0.0), per_token=per_token)
