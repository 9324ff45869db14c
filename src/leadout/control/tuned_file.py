"""The file that `leadout tune` writes: measured costs and acceptance of a pair, and its best K.

Also what it is made of: the speed-ups that costs and acceptance predict (`gain`), and the choice of
a K for each batch size from measured speed-ups (`choose_table`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from leadout.control.acceptance_model import AcceptanceCurve
from leadout.control.cost_model import PiecewiseLinear, StepCosts
from leadout.errors import LeadoutError
from leadout.files import FileError, read_model, write_text
from leadout.models import fingerprint
from leadout.provenance import Provenance
from leadout.settings import SettingsError
from leadout.stats import Interval


@dataclass(frozen=True, slots=True)
class Gain:
    """Predicted decoding speed at one batch size and K; speed-ups are over a bare engine."""

    batch: int
    k: int
    tokens_per_second: float
    speedup: float
    perfect: float  # if every draft were accepted, at the present cost of drafting
    free: float  # if drafting cost nothing, at the present acceptance


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


NEARLY_EQUAL = 0.01  # of the speed-up: what repeated measurements differ by anyway

Speedups = Mapping[int, Mapping[int, Interval]]  # by batch size and K; K = 0: context only
Range = tuple[int, int, int]  # first and last batch size, K


@dataclass(frozen=True, slots=True)
class Choice:
    """The K of a server at one batch size, and its speed relative to a bare server."""

    batch: int
    k: int
    speedup: Interval

    @property
    def gains(self) -> bool:
        """Whether drafting is significantly faster: the whole interval lies above 1."""
        return self.k > 0 and self.speedup.low > 1


@dataclass(frozen=True, slots=True)
class Table:
    choices: tuple[Choice, ...]  # of batch sizes 1, 2, ...
    break_even: float | None  # batch size at which the best K stops gaining; None: not measured

    @property
    def loses_above(self) -> int | None:
        """The largest batch size with a significant gain; None if it is the last one measured."""
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
    """The best K for batch sizes 1 to `max_batch`, interpolated between measured ones.

    A server with a drafter pays for it even at K = 0, as the drafter's context is kept up to date.
    So if no batch size gains significantly, the best server is a bare one; otherwise the batch
    sizes that do not gain get the K that loses least on a server with the drafter.
    """
    speedups = speedups_at(measured, max_batch)
    gaining = {batch: _best_above(1, by_k) for batch, by_k in speedups.items()}
    if not any(gaining.values()):
        nothing = Interval(value=1.0, low=1.0, high=1.0)
        choices = [Choice(batch, 0, nothing) for batch in speedups]
    else:
        choices = [
            Choice(batch, k, by_k[k])
            for batch, by_k in speedups.items()
            for k in (gaining[batch] or _best_above(by_k[0].value, by_k),)
        ]
    return Table(tuple(choices), _break_even(speedups))


def speedups_at(measured: Speedups, max_batch: int) -> dict[int, dict[int, Interval]]:
    """For every batch size from 1 on and each K that all measured batch sizes have; linear."""
    common = sorted(set.intersection(*(set(by_k) for by_k in measured.values())))

    def at(batch: int, k: int, edge: str) -> float:
        points = {size: getattr(by_k[k], edge) for size, by_k in measured.items()}
        return PiecewiseLinear.through(points)(batch)

    return {
        batch: {
            k: Interval(**{edge: at(batch, k, edge) for edge in ("value", "low", "high")})
            for k in common
        }
        for batch in range(1, max_batch + 1)
    }


def _best_above(threshold: float, speedups: Mapping[int, Interval]) -> int:
    """The smallest K close to the best of those significantly above the threshold; 0 for none."""
    above = {k: s.value for k, s in speedups.items() if k > 0 and s.low > threshold}
    best = max(above.values(), default=0.0)
    return min((k for k, value in above.items() if value >= best * (1 - NEARLY_EQUAL)), default=0)


def _break_even(speedups: Speedups) -> float | None:
    """Where the best speed-up falls below 1 for the last time."""
    best = {
        batch: max(speedup.value for k, speedup in by_k.items() if k > 0)
        for batch, by_k in speedups.items()
    }
    for batch in sorted(best, reverse=True)[1:]:
        above, below = best[batch], best[batch + 1]
        if above > 1:
            return batch + (above - 1) / (above - below) if below <= 1 else None
    return None


# Far above every server; they keep a damaged file from being computed with.
MAX_BATCH, MAX_DRAFTS = 2**20, 2**12
Batch = Annotated[int, Field(ge=1, le=MAX_BATCH)]
Drafts = Annotated[int, Field(ge=0, le=MAX_DRAFTS)]  # of one request
Curve = Annotated[dict[Drafts, Interval], Field(min_length=1)]
CostCurves = Annotated[dict[Batch, Curve], Field(min_length=1)]


class TunedFileError(LeadoutError):
    """A file that `leadout tune` of this version did not write."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Part):
    name: str
    fingerprint: str


class Acceptance(_Part):
    """Tokens of a request in a step, by K, and the share of steps that accept each position."""

    tokens: Curve
    by_position: list[Interval]  # with the largest K
    requests: int
    steps: int


class PrefillLaw(_Part):
    """Seconds of a prefill step: `base + per_token * tokens`."""

    base: float
    per_token: float

    def seconds(self, tokens: int) -> float:
        return self.base + self.per_token * tokens


class ServerConfig(_Part):
    """What else changes the cost of a step, as vLLM resolved it for the bare server."""

    async_scheduling: bool
    cuda_graphs: str  # vLLM's cudagraph_mode
    tensor_parallel_size: int
    pipeline_parallel_size: int
    quantization: str | None
    kv_cache_dtype: str
    device: str | None = None  # the name of the accelerator; None for a CPU, and in earlier files


@dataclass(frozen=True, slots=True)
class Loss:
    """The K that loses least at a batch size where every K loses."""

    batch: int
    k: int
    tokens: Interval  # of a request in a step
    break_even: float


class Tuned(_Part):
    """The content of the file."""

    format: Literal[1] = 1
    provenance: Provenance
    target: Model
    drafter: Model
    dtype: str
    block_size: int = Field(ge=2, le=MAX_DRAFTS)
    runner: Literal["V1", "V2"]
    max_batch: Batch
    # Seconds; verify[batch][0] is a bare step, draft[batch][0] only updates the drafter's context.
    verify: CostCurves
    draft: CostCurves
    acceptance: Acceptance
    speedup: CostCurves  # over a bare engine, by batch size and K
    prefill_bare: PrefillLaw
    prefill_drafting: PrefillLaw
    table: list[Range]
    break_even: float | None
    loses_above: int | None
    # The measured servers; not recorded by earlier versions.
    flags: list[str] = Field(default_factory=list)  # the user's for vLLM, without keys
    server: ServerConfig | None = None
    turns: Literal["slices", "waves", "single"] | None = None

    @model_validator(mode="after")
    def _table_covers_all_batch_sizes(self) -> Self:
        expected = 1
        for first, last, k in self.table:
            if first != expected or last < first or not 0 <= k < self.block_size:
                raise ValueError(
                    f"table row {[first, last, k]} should begin at batch size {expected} and have "
                    f"0 <= K < {self.block_size}"
                )
            expected = last + 1
        if expected != self.max_batch + 1:
            raise ValueError(
                f"the table ends at batch size {expected - 1}, expected {self.max_batch}"
            )
        return self

    @model_validator(mode="after")
    def _can_be_computed_with(self) -> Self:
        for name in ("verify", "draft", "speedup"):
            values = [y for curve in getattr(self, name).values() for y in curve.values()]
            if not all(0 <= each.value < math.inf for each in values):
                raise ValueError(f"{name} has a value that is not finite, or below 0")
        if not all(y.value > 0 for curve in self.verify.values() for y in curve.values()):
            raise ValueError("verify has a step that takes no time")
        tokens = self.acceptance.tokens
        if 0 not in tokens or tokens[0].value != 1:
            raise ValueError("acceptance.tokens should begin with exactly 1 token at K = 0")
        if not all(1 <= each.value < math.inf for each in tokens.values()):
            raise ValueError("acceptance.tokens has a value that is not finite, or below 1")
        return self

    @property
    def max_drafts(self) -> int:
        """The largest K of the table; 0 means to serve without the drafter."""
        return max(k for _, _, k in self.table)

    def k_at(self, batch: int) -> int:
        return next(k for first, last, k in self.table if first <= batch <= last)

    def require_pair(self, target: Path, drafter: Path) -> None:
        """Refuse a file that was measured with other models."""
        again = f"`leadout tune {target} {drafter}`"
        _require_same("target", self.target, target, again)
        _require_same("drafter", self.drafter, drafter, again)

    def notes_on_version(self, target: Path, drafter: Path, block_size: int) -> list[str]:
        """What to know if the drafter is a version of a registry; another target is refused.

        Versions replace each other while servers run, and have the same shape, on which the costs
        depend. So a restart with a later version than the measured one is no reason to refuse.
        """
        if fingerprint(drafter) == self.drafter.fingerprint or block_size != self.block_size:
            self.require_pair(target, drafter)
            return []
        _require_same("target", self.target, target, f"`leadout tune {target} {drafter}`")
        return [
            f"--tuned: measured with the drafter {self.drafter.name}, not with this version of the "
            "registry; steps take as long if it has the same shape, but acceptance may differ. "
            "Tune again, or use --live, which follows acceptance"
        ]

    def break_even_length(self, batch: int, k: int) -> float:
        """The acceptance length at which a step with K drafts pays for itself."""
        costs = self.costs()
        return costs.step_seconds(batch, k) / costs.bare_seconds(batch)

    def losing_at(self, max_batch: int) -> list[Loss]:
        """Measured batch sizes at which acceptance is significantly below break-even at any K."""
        found = []
        for batch in sorted(size for size in self.verify if size <= max_batch):
            options = [
                Loss(batch, k, tokens, self.break_even_length(batch, k))
                for k, tokens in self.acceptance.tokens.items()
                if k > 0
            ]
            if options and all(each.tokens.high < each.break_even for each in options):
                found.append(max(options, key=lambda each: each.tokens.value / each.break_even))
        return found

    def costs(self) -> StepCosts:
        return StepCosts(verify=_values(self.verify), draft=_values(self.draft))

    def curve(self) -> AcceptanceCurve:
        """Linear between the measured K."""
        line = PiecewiseLinear.through({k: s.value for k, s in self.acceptance.tokens.items()})
        return AcceptanceCurve(tuple(line(k) for k in range(max(self.acceptance.tokens) + 1)))


def _values(curves: CostCurves) -> dict[int, dict[int, float]]:
    return {batch: {x: y.value for x, y in curve.items()} for batch, curve in curves.items()}


def _require_same(role: str, measured: Model, folder: Path, again: str) -> None:
    found = fingerprint(folder)
    if found != measured.fingerprint:
        raise SettingsError(
            f"--tuned: the file is for the {role} {measured.name} ({measured.fingerprint[:12]}), "
            f"not for {folder} ({found[:12]}). Run {again}."
        )


def write_tuned(tuned: Tuned, path: Path) -> None:
    write_text(path, tuned.model_dump_json(indent=2) + "\n")


def read_tuned(path: Path) -> Tuned:
    try:
        return read_model(path, Tuned)
    except FileError as problem:
        raise TunedFileError(
            f"{problem} Expected a file written by `leadout tune` of this version; check the path, "
            "or tune again."
        ) from None
