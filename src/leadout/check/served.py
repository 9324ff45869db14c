"""Acceptance as the engine counts it."""

from __future__ import annotations

from collections.abc import Sequence

from leadout.check.result import ServedAcceptance
from leadout.engine.session import SetRun


def acceptance_of(runs: Sequence[SetRun]) -> list[ServedAcceptance]:
    """One entry for each temperature, in the order of the runs."""
    temperatures = dict.fromkeys(run.temperature for run in runs)
    return [
        _at_one([run for run in runs if run.temperature == temperature])
        for temperature in temperatures
    ]


def _at_one(runs: Sequence[SetRun]) -> ServedAcceptance:
    steps = sum(run.steps for run in runs)
    accepted = [
        sum(counts) for counts in zip(*(run.accepted_by_position for run in runs), strict=True)
    ]
    return ServedAcceptance(
        temperature=runs[0].temperature,
        steps=steps,
        length=_length(sum(accepted), steps),
        by_position=[count / max(steps, 1) for count in accepted],
        by_set={run.prompt_set: _length(sum(run.accepted_by_position), run.steps) for run in runs},
    )


def _length(accepted: int, steps: int) -> float:
    return 1 + accepted / max(steps, 1)
