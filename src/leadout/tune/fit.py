"""From timed steps to costs and tokens per step, with bootstrap intervals.

`fit_steps` fits the additive cost of a step,

    step(verified v, drafted k) = verify[v] + draft[k],    verify[0] = a bare step

in units of the bare step of the same turn, so that a slow second of the machine cancels. Each cell
(v, k) is the median of its steps, which a few disturbed steps do not move. The costs are a least
squares fit of these medians, weighted by their numbers of steps, and never decrease in v or k.
Intervals come from resampling turns.

A server with a drafter that neither verifies nor drafts does more than a bare one. Where its steps
were shorter all the same, something else slowed the bare server down, and the shorter steps count
as bare.

`fit_acceptance` estimates tokens per step by K. Every request generates the same number of tokens,
so texts that draft well do not count for more, and every prompt is answered with every K, so that
resampled prompts compare the same texts.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from leadout.control.tuned_file import PrefillLaw
from leadout.engine.calibration import Prefill, RoundResult, Turn
from leadout.stats import Floats, Indices, Sampled, multiplicities, never_falling
from leadout.tune.settings import TuneError

Cell = tuple[int, int]  # drafts verified, drafted


@dataclass(frozen=True, slots=True)
class Accepted:
    tokens: Mapping[int, Sampled]  # by K
    by_position: Sequence[Sampled]  # for the largest K: share of steps that accept n drafts
    requests: int
    steps: int


def fit_acceptance(rounds: Sequence[RoundResult]) -> Accepted:
    prompts = sorted({gained.prompt for each in rounds for gained in each.gained})
    counts = multiplicities(len(prompts), seed=1)
    drafting = [each for each in rounds if each.k]
    lengths = sorted({each.k for each in drafting})

    def mean(k: int, of_step: Callable[[int], float]) -> tuple[Floats, Floats]:
        """Mean of `of_step` over all steps with this K, and the number of steps: both [draws]."""
        sums, steps = np.zeros((2, len(prompts)))
        for each in (each for each in drafting if each.k == k):
            for gained in each.gained:
                place = prompts.index(gained.prompt)
                sums[place] += sum(map(of_step, gained.tokens))
                steps[place] += len(gained.tokens)
        drawn = counts @ steps
        return counts @ sums / np.maximum(drawn, 1), drawn

    found = [mean(k, float) for k in lengths]
    values, weights = (np.stack(columns, axis=1) for columns in zip(*found, strict=True))
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
    """For a step's tokens: whether all drafts up to a position (from 1) were accepted."""
    return lambda tokens: float(tokens > position)


@dataclass(frozen=True, slots=True)
class StepLaw:
    """Costs at one batch size, in bare steps; `bare` is one in seconds."""

    bare: Sampled
    verify: Mapping[int, Sampled]
    draft: Mapping[int, Sampled]

    def step(self, k: int) -> Sampled:
        """A step that verifies k drafts and drafts k again."""
        return self.verify[k] + self.draft[k]


def whole_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Those in which both servers decoded the whole batch at least once."""
    return [turn for turn in turns if turn.bare and turn.steps]


def fit_steps(turns: Sequence[Turn], seed: int = 0) -> StepLaw:
    whole = whole_turns(turns)
    if not whole:
        raise TuneError(
            "the servers never decoded a full batch: lower --max-batch, use shorter --prompts, or "
            "give the servers more memory for their caches."
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
    idle = medians.get((0, 0), np.ones(len(counts)))  # [draws], in steps of the bare server
    unit = np.where(idle > 0, np.minimum(idle, 1.0), 1.0)
    verify, draft = _additive({cell: found / unit for cell, found in medians.items()}, weights)
    return StepLaw(Sampled(weighted_median(bare, counts) * unit), verify, draft)


def weighted_median(values: Sequence[tuple[int, float]], counts: Floats) -> Floats:
    """Median of (unit, value) pairs for each row of `counts` [draws, units]; 0 without any."""
    units, sorted_values = _columns(sorted(values, key=lambda pair: pair[1]))
    running = counts[:, units].cumsum(1)
    half = running[:, -1:] / 2
    last = len(values) - 1
    low = np.minimum((running < half).sum(1), last)
    high = np.minimum((running <= half).sum(1), last)
    middle = (sorted_values[low] + sorted_values[high]) / 2
    return np.where(half[:, 0] > 0, middle, 0.0)


def _counted(values: Sequence[tuple[int, float]], counts: Floats) -> Floats:
    units, _ = _columns(values)
    return np.asarray(counts[:, units].sum(1))


def _columns(values: Sequence[tuple[int, float]]) -> tuple[Indices, Floats]:
    units = np.array([unit for unit, _ in values], dtype=np.int64)
    return units, np.array([value for _, value in values], dtype=np.float64)


def _additive(
    medians: Mapping[Cell, Floats], weights: Mapping[Cell, Floats]
) -> tuple[dict[int, Sampled], dict[int, Sampled]]:
    """Weighted least squares of verify[v] + draft[k] through the cells, in every draw."""
    verified = sorted({v for v, _ in medians} - {0})
    drafted = sorted({k for _, k in medians})
    place = {("verify", v): number for number, v in enumerate(verified)}
    place |= {("draft", k): len(verified) + number for number, k in enumerate(drafted)}
    cells = list(medians)
    design = np.zeros((len(cells), len(place)))
    for row, (v, k) in enumerate(cells):
        design[row, place["draft", k]] = 1
        if v:
            design[row, place["verify", v]] = 1
    measured = np.stack([medians[v, k] - float(v == 0) for v, k in cells], axis=1)
    weight = np.stack([weights[cell] for cell in cells], axis=1)
    weighted = weight[:, :, None] * design
    normal = design.T @ weighted
    # A draw may contain no step of a cell: the unknowns it does not determine stay near zero.
    normal = normal + 1e-9 * np.eye(len(place))
    found = np.linalg.solve(normal, (weighted * measured[:, :, None]).sum(1)[:, :, None])[:, :, 0]
    steps = weighted.sum(1)  # steps that determine each unknown

    def curve(name: str, at: Sequence[int], minimum: float) -> dict[int, Sampled]:
        columns = [place[name, each] for each in at]
        rising = np.maximum(never_falling(found[:, columns], steps[:, columns]), minimum)
        return {each: Sampled(column) for each, column in zip(at, rising.T, strict=True)}

    # Verifying drafts never makes a step shorter, and the cost of drafting is never negative.
    verify = curve("verify", verified, 1.0) if verified else {}
    return {0: Sampled.exactly(1.0), **verify}, curve("draft", drafted, 0.0)


def fit_prefill(steps: Sequence[Prefill]) -> PrefillLaw:
    """A Theil-Sen line: its slope is the median of the slopes between all pairs of steps."""
    slopes = [
        (b.seconds - a.seconds) / (b.tokens - a.tokens)
        for number, a in enumerate(steps)
        for b in steps[number + 1 :]
        if a.tokens != b.tokens
    ]
    per_token = max(statistics.median(slopes), 0.0) if slopes else 0.0
    rest = [step.seconds - per_token * step.tokens for step in steps]
    return PrefillLaw(base=max(statistics.median(rest), 0.0), per_token=per_token)
