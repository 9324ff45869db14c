"""Tokens per second with and without drafts, and the limits of any drafter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from leadout.control.acceptance_model import AcceptanceCurve
from leadout.control.cost_model import Line, StepCosts
from leadout.errors import LeadoutError
from leadout.provenance import Provenance
from leadout.stats import Interval


@dataclass(frozen=True, slots=True)
class Gain:
    """Decoding at one batch size and K; speed-ups are over a bare engine."""

    batch: int
    k: int
    tokens_per_second: float
    speedup: float
    perfect: float  # every draft stands, drafting costs what it costs
    free: float  # drafts stand as they do, drafting costs nothing


def gain(costs: StepCosts, curve: AcceptanceCurve, batch: int, k: int) -> Gain:
    bare = 1 / costs.bare_seconds(batch)  # tokens per second of one request
    rate = curve.tokens[k] / costs.step_seconds(batch, k)
    return Gain(
        batch=batch,
        k=k,
        tokens_per_second=batch * rate,
        speedup=rate / bare,
        perfect=(k + 1) / costs.step_seconds(batch, k) / bare,
        free=curve.tokens[k] / costs.verify_seconds(batch, k * batch) / bare,
    )


# How many tokens to draft at each batch size, from measured speed-ups over a bare engine.
#
# A server with a drafter pays for it also where it drafts nothing: the drafter's context is kept
# up.
# So there are two questions. Is there a batch size at which drafting surely gains? If not, the best
# server is a bare one. If so, the others get what loses least in a server that has the drafter.

NEARLY_EQUAL = 0.01  # of the speed-up: what repeated measurements differ by anyway

Speedups = Mapping[int, Mapping[int, Interval]]  # by batch size and K; K = 0 is the keeping up
Range = tuple[int, int, int]  # first and last batch size, K


@dataclass(frozen=True, slots=True)
class Choice:
    """What a server does at one batch size, and its speed over that of a bare server."""

    batch: int
    k: int
    speedup: Interval

    @property
    def gains(self) -> bool:
        """Whether drafting surely pays: the whole interval lies above 1."""
        return self.k > 0 and self.speedup.low > 1


@dataclass(frozen=True, slots=True)
class Table:
    choices: tuple[Choice, ...]  # of batch sizes 1, 2, ...
    break_even: float | None  # batch size at which the best K no longer gains; None: not within

    @property
    def is_bare(self) -> bool:
        """Nothing is ever drafted, so the drafter should not be there."""
        return all(choice.k == 0 for choice in self.choices)

    @property
    def loses_above(self) -> int | None:
        """The last batch size that surely gains; None if it is the last one measured."""
        gaining = [choice.batch for choice in self.choices if choice.gains]
        last = max(gaining, default=0)
        return None if last == len(self.choices) else last

    def ranges(self) -> list[Range]:
        found = []
        for k, run in groupby(self.choices, key=lambda choice: choice.k):
            batches = [choice.batch for choice in run]
            found.append((batches[0], batches[-1], k))
        return found


def choose_table(measured: Speedups, max_batch: int) -> Table:
    """The best table for batch sizes 1 to `max_batch`, which was measured or lies between."""
    speedups = speedups_at(measured, max_batch)
    gaining = {batch: _surely_gaining(by_k) for batch, by_k in speedups.items()}
    if not any(gaining.values()):
        nothing = Interval(value=1.0, low=1.0, high=1.0)
        choices = [Choice(batch, 0, nothing) for batch in speedups]
    else:
        choices = [
            Choice(batch, k, by_k[k])
            for batch, by_k in speedups.items()
            for k in (gaining[batch] or _least_losing(by_k),)
        ]
    return Table(tuple(choices), _break_even(speedups))


def speedups_at(measured: Speedups, max_batch: int) -> dict[int, dict[int, Interval]]:
    """At every batch size from 1 on."""
    return {batch: _between(measured, batch) for batch in range(1, max_batch + 1)}


def _between(measured: Speedups, batch: int) -> dict[int, Interval]:
    """Straight between the measured batch sizes."""
    drafted = sorted(set.intersection(*(set(by_k) for by_k in measured.values())))

    def at(k: int, edge: str) -> float:
        return Line.through({size: getattr(by_k[k], edge) for size, by_k in measured.items()})(
            batch
        )

    return {
        k: Interval(value=at(k, "value"), low=at(k, "low"), high=at(k, "high")) for k in drafted
    }


def _surely_gaining(speedups: Mapping[int, Interval]) -> int:
    """The best K whose gain is more than noise, the smallest of nearly equal ones; 0 for none."""
    return _best({k: s for k, s in speedups.items() if k > 0 and s.low > 1})


def _least_losing(speedups: Mapping[int, Interval]) -> int:
    """Draft nothing, unless some K is surely faster than keeping up the drafter for nothing."""
    idle = speedups[0].value
    return _best({k: s for k, s in speedups.items() if k > 0 and s.low > idle})


def _best(candidates: Mapping[int, Interval]) -> int:
    if not candidates:
        return 0
    best = max(speedup.value for speedup in candidates.values())
    return min(k for k, s in candidates.items() if s.value >= best * (1 - NEARLY_EQUAL))


def _break_even(speedups: Speedups) -> float | None:
    """Where the best speed-up falls through 1, for the last time."""
    best = {
        batch: max(speedup.value for k, speedup in by_k.items() if k > 0)
        for batch, by_k in speedups.items()
    }
    for batch in sorted(best, reverse=True)[1:]:
        above, below = best[batch], best[batch + 1]
        if above > 1:
            return batch + (above - 1) / (above - below) if below <= 1 else None
    return None


# The file that `leadout tune` writes: what was measured of a pair on a machine, and the table.

CostCurves = dict[int, dict[int, Interval]]  # by batch size, then by drafts of one request


class TunedFileError(LeadoutError):
    """A file that is not, or no longer, one of `leadout tune`."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Part):
    name: str
    fingerprint: str


class Acceptance(_Part):
    """Tokens that a request gains in a step, by K, and the share of drafts that stand."""

    tokens: dict[int, Interval]
    by_position: list[Interval]  # with the largest K
    requests: int
    steps: int


class PrefillLaw(_Part):
    """Seconds of a step that reads prompts: `base + per_token * tokens`."""

    base: float
    per_token: float

    def seconds(self, tokens: int) -> float:
        return self.base + self.per_token * tokens


class Tuned(_Part):
    format: Literal[1] = 1
    provenance: Provenance
    target: Model
    drafter: Model
    dtype: str
    block_size: int = Field(ge=2)
    runner: Literal["V1", "V2"]
    max_batch: int = Field(ge=1)
    # Seconds; verify[batch][0] is a bare step, draft[batch][0] keeping up the drafter's context.
    verify: CostCurves
    draft: CostCurves
    acceptance: Acceptance
    speedup: CostCurves  # over a bare engine, by batch size and K
    prefill_bare: PrefillLaw
    prefill_drafting: PrefillLaw
    table: list[Range]
    break_even: float | None
    loses_above: int | None

    @model_validator(mode="after")
    def _table_is_whole(self) -> Self:
        expected = 1
        for first, last, k in self.table:
            if first != expected or last < first or not 0 <= k < self.block_size:
                raise ValueError(
                    f"table: found the row {[first, last, k]}, wanted one that begins at batch "
                    f"size {expected} with 0 <= K < {self.block_size}"
                )
            expected = last + 1
        if expected != self.max_batch + 1:
            raise ValueError(
                f"table: found rows up to batch size {expected - 1}, wanted up to {self.max_batch}"
            )
        return self

    @property
    def most_drafts(self) -> int:
        """The largest K of the table; 0 says to serve without the drafter."""
        return max(k for _, _, k in self.table)

    def k_at(self, batch: int) -> int:
        return next(k for first, last, k in self.table if first <= batch <= last)

    def costs(self) -> StepCosts:
        return StepCosts(verify=_values(self.verify), draft=_values(self.draft))

    def curve(self) -> AcceptanceCurve:
        """Straight between the measured K."""
        line = Line.through({k: found.value for k, found in self.acceptance.tokens.items()})
        return AcceptanceCurve(tuple(line(k) for k in range(max(self.acceptance.tokens) + 1)))


def _values(curves: CostCurves) -> dict[int, dict[int, float]]:
    return {
        batch: {place: found.value for place, found in curve.items()}
        for batch, curve in curves.items()
    }


def write_tuned(tuned: Tuned, path: Path) -> None:
    """Aside, then renamed: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(tuned.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_tuned(path: Path) -> Tuned:
    try:
        return Tuned.model_validate_json(path.read_bytes())
    except OSError as problem:
        raise TunedFileError(
            f"{path}: found {problem.strerror}, wanted a file that `leadout tune` wrote; check the "
            "path"
        ) from None
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise TunedFileError(
            f"{path}: {field}: {first['msg']}; wanted a file as `leadout tune` of this version "
            "writes it; tune again"
        ) from None
