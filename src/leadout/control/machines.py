"""Two made-up machines for the simulator: a small CPU, and a GPU that has time to spare."""

from __future__ import annotations

from collections.abc import Callable

from leadout.control.costs import StepCosts
from leadout.control.processes import MOST

BATCHES = (1, 2, 4, 8, 16, 32, 64)
Seconds = Callable[[int, int], float]  # of a batch and the drafts of each of its requests


def cpu() -> StepCosts:
    """Like a 135M target on two cores: 36.5 ms bare, and every verified token counts."""

    def verify(batch: int, drafts: int) -> float:
        beyond = max(0, batch * (1 + drafts) - 8)
        return 1e-3 * (35.8 + 0.73 * batch + 0.35 * batch * drafts + 0.12 * beyond)

    def draft(batch: int, k: int) -> float:
        return 1e-3 * (0.8 + (5.5 + 0.36 * batch * k if k else 0.0))

    return _costs(verify, draft)


def gpu() -> StepCosts:
    """Memory-bound up to 256 tokens a pass; drafting costs a tenth of a step."""

    def verify(batch: int, drafts: int) -> float:
        tokens = batch * (1 + drafts)
        return 1e-3 * (8.0 + 0.01 * batch + 0.001 * tokens + 0.025 * max(0, tokens - 256))

    def draft(batch: int, k: int) -> float:
        return 1e-3 * (0.05 + (0.8 + 0.001 * batch * k if k else 0.0))

    return _costs(verify, draft)


def _costs(verify: Seconds, draft: Seconds) -> StepCosts:
    places = range(MOST + 1)
    return StepCosts(
        verify={batch: {drafts: verify(batch, drafts) for drafts in places} for batch in BATCHES},
        draft={batch: {k: draft(batch, k) for k in places} for batch in BATCHES},
    )


MACHINES: dict[str, Callable[[], StepCosts]] = {"cpu": cpu, "gpu": gpu}
