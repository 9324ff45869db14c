"""Tokens per second with and without drafts, and the limits of any drafter."""

from __future__ import annotations

from dataclasses import dataclass

from leadout.control.acceptance import AcceptanceCurve
from leadout.control.costs import StepCosts


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
