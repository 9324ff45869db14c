"""The file that `leadout tune` writes: what was measured of a pair on a machine, and the table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from leadout.control.acceptance import AcceptanceCurve
from leadout.control.costs import Line, StepCosts
from leadout.control.interval import Interval
from leadout.control.table import Range
from leadout.provenance import Provenance

CostCurves = dict[int, dict[int, Interval]]  # by batch size, then by drafts of one request


class TunedFileError(ValueError):
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
