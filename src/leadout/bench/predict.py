"""Speed-ups predicted from a tuned file's cost model, for comparison with measured ones.

The engine's time for a request of n output tokens, at concurrency c:

    base / c + per_token * prompt + (n - 1) * step(c, K) / (c * tokens per step)

The first token comes with the prefill. A prompt joins a step in which other requests decode, so
the fixed cost of that step is shared by all c. Tokens per step are those measured in the cell: the
model predicts speed from acceptance, not acceptance itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leadout.bench.setup import Arm
from leadout.control.cost_model import StepCosts
from leadout.control.tuned_file import PrefillLaw, Range, Tuned

CLOSE = 0.15  # relative error up to which a prediction counts as correct


@dataclass(frozen=True, slots=True)
class CostModel:
    """Step costs, prefill costs and the table of draft lengths of one pair on one machine."""

    drafter: str
    costs: StepCosts
    bare_prefill: PrefillLaw
    drafting_prefill: PrefillLaw
    table: Sequence[Range]

    @classmethod
    def of(cls, tuned: Tuned, drafter: str) -> CostModel:
        """`drafter` is the name that the arms use for the tuned file's drafter."""
        costs, prefills = tuned.costs(), (tuned.prefill_bare, tuned.prefill_drafting)
        return cls(drafter, costs, *prefills, tuned.table)

    def covers(self, arm: Arm) -> bool:
        """Whether the arm uses this drafter; a tuned arm without a name uses the file's own."""
        return arm.kind in ("fixed", "tuned") and arm.drafter in (None, self.drafter)

    def draft_tokens(self, arm: Arm, batch: int) -> int:
        """K of an arm at a batch size; the table's last row also applies beyond its end."""
        if arm.draft_tokens is not None:
            return arm.draft_tokens
        found = (k for first, last, k in self.table if first <= batch <= last)
        return next(found, self.table[-1][2])

    @property
    def never_drafts(self) -> bool:
        return all(k == 0 for _, _, k in self.table)


@dataclass(frozen=True, slots=True)
class Served:
    """The load of a cell, per request."""

    concurrency: int
    prompt_tokens: float
    output_tokens: int


def bare_rate(model: CostModel, served: Served) -> float:
    """Output tokens per second without a drafter."""
    step = model.costs.bare_seconds(served.concurrency)
    return served.output_tokens / _request_seconds(model.bare_prefill, served, step, 1.0)


def drafting_rate(model: CostModel, served: Served, k: int, tokens_per_step: float) -> float:
    """Output tokens per second when every step drafts and verifies k tokens of each request."""
    step = model.costs.step_seconds(served.concurrency, k)
    per_step = tokens_per_step if k else 1.0
    return served.output_tokens / _request_seconds(model.drafting_prefill, served, step, per_step)


def predicted_speedup(model: CostModel, served: Served, k: int, tokens_per_step: float) -> float:
    return drafting_rate(model, served, k, tokens_per_step) / bare_rate(model, served)


def _request_seconds(prefill: PrefillLaw, served: Served, step: float, per_step: float) -> float:
    c = served.concurrency
    prefill_seconds = prefill.base / c + prefill.per_token * served.prompt_tokens
    return prefill_seconds + (served.output_tokens - 1) * step / (c * per_step)


def share_close(pairs: Sequence[tuple[float, float]]) -> float:
    """Share of (predicted, measured) pairs within `CLOSE` of each other."""
    return sum(abs(predicted / measured - 1) <= CLOSE for predicted, measured in pairs) / len(pairs)
