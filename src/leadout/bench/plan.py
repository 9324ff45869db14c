"""The cells of a bench in the order in which they are measured, and how long they will take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from leadout.bench.settings import BenchSettings
from leadout.control.costs import Line

_SECONDS_BETWEEN = 1.5  # the generator's tokenizer and the like, at every cell


class Cell(BaseModel):
    """One load on one server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_set: str
    concurrency: int
    round: int
    arm: str


def all_cells(settings: BenchSettings) -> list[Cell]:
    """Round after round; in a round the arms take turns at every cell, so noise hits them alike.

    Another arm begins in every round.
    """
    names = [arm.name for arm in settings.arms]
    return [
        Cell(prompt_set=prompt_set, concurrency=concurrency, round=number, arm=arm)
        for number in range(settings.rounds)
        for prompt_set in settings.prompts
        for concurrency in settings.concurrencies
        for arm in rotated(names, number)
    ]


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The same names, another one first."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


@dataclass(frozen=True, slots=True)
class Rates:
    """Output tokens per second by concurrency, and where they were taken from."""

    tokens_per_second: Mapping[int, float]
    source: str


class BenchPlan(BaseModel):
    model_config = ConfigDict(extra="forbid")

    arms: list[str]
    prompt_sets: list[str]
    concurrencies: list[int]
    rounds: int
    cells: int
    cells_done: int
    output_tokens: int
    minutes: float
    rates: dict[int, float]
    rates_from: str


def make_plan(settings: BenchSettings, done: Sequence[Cell], rates: Rates) -> BenchPlan:
    """What is left to do and how long that takes, if every arm is as fast as the rates."""
    left = [cell for cell in all_cells(settings) if cell not in set(done)]
    speed = Line.through(rates.tokens_per_second)
    tokens = [settings.requests_at(cell.concurrency) * settings.output_tokens for cell in left]
    seconds = sum(
        count / speed(cell.concurrency) + _SECONDS_BETWEEN
        for count, cell in zip(tokens, left, strict=True)
    )
    return BenchPlan(
        arms=[arm.name for arm in settings.arms],
        prompt_sets=list(settings.prompts),
        concurrencies=settings.concurrencies,
        rounds=settings.rounds,
        cells=len(left),
        cells_done=len(all_cells(settings)) - len(left),
        output_tokens=sum(tokens),
        minutes=seconds / 60,
        rates=dict(rates.tokens_per_second),
        rates_from=rates.source,
    )
