"""Tunings of a made-up machine, whose costs and acceptance are known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from leadout.control.acceptance_model import AcceptanceCurve
from leadout.control.tuned_file import (
    Acceptance,
    CostCurves,
    Model,
    PrefillLaw,
    Tuned,
    choose_table,
)
from leadout.provenance import Provenance
from leadout.stats import Interval
from leadout.version import installed_versions

BATCHES = (1, 2, 4, 8, 16)


def near(value: float, spread: float = 0.01) -> Interval:
    return Interval(value=value, low=value * (1 - spread), high=value * (1 + spread))


def speedups_of(
    odds: list[float],
    *,
    per_draft: float = 0.05,
    drafting: float = 0.1,
    spread: float = 0.01,
    batches: Sequence[int] = BATCHES,
) -> dict[int, dict[int, Interval]]:
    """A verified draft costs `per_draft` bare steps times the batch size, drafting `drafting`."""
    tokens = AcceptanceCurve.from_probabilities(odds).tokens
    return {
        batch: {
            k: near(tokens[k] / (1 + per_draft * batch * k + drafting), spread)
            for k in range(len(tokens))
        }
        for batch in batches
    }


def a_tuning(
    odds: list[float],
    *,
    target: Model | None = None,
    drafter: Model | None = None,
    block_size: int | None = None,
    per_draft: float = 0.05,
    batches: Sequence[int] = BATCHES,
    step_seconds: float = 0.04,
    runner: Literal["V1", "V2"] = "V1",
) -> Tuned:
    """`step_seconds` is the time of a bare step."""
    speedup = speedups_of(odds, per_draft=per_draft, batches=batches)
    table = choose_table(speedup, batches[-1])
    most = len(odds)
    verify: CostCurves = {
        b: {v: near(step_seconds * (1 + per_draft * b * v)) for v in range(most + 1)}
        for b in batches
    }
    tokens = AcceptanceCurve.from_probabilities(odds).tokens
    return Tuned(
        provenance=Provenance.of_this_run().model_copy(update={"versions": installed_versions()}),
        target=target or Model(name="a-target", fingerprint="1" * 64),
        drafter=drafter or Model(name="a-drafter", fingerprint="2" * 64),
        dtype="bfloat16",
        block_size=block_size or most + 1,
        runner=runner,
        max_batch=batches[-1],
        verify=verify,
        draft={b: {k: near(0.1 * step_seconds) for k in range(most + 1)} for b in batches},
        acceptance=Acceptance(
            tokens={k: near(tokens[k], 0.0 if k == 0 else 0.01) for k in range(most + 1)},
            by_position=[near(b - a) for a, b in pairwise(tokens)],
            requests=60,
            steps=1200,
        ),
        speedup=speedup,
        prefill_bare=PrefillLaw(base=0.02, per_token=0.0005),
        prefill_drafting=PrefillLaw(base=0.03, per_token=0.0006),
        table=table.ranges(),
        break_even=table.break_even,
        loses_above=table.loses_above,
    )
