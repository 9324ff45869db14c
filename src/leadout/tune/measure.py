"""From what the engines did to curves with intervals, and from those to the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leadout.control.interval import Interval
from leadout.control.table import choose_table
from leadout.control.tuned import Acceptance, Model, Tuned
from leadout.engine.calibration import CalibrationResult, RoundResult, Turn
from leadout.provenance import Provenance
from leadout.tune.accepted import Accepted, fit_acceptance
from leadout.tune.fit import StepLaw, fit_prefill, fit_steps
from leadout.tune.sampled import Sampled


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured."""

    target: Model
    drafter: Model
    block_size: int


def tuned_of(result: CalibrationResult, subject: Subject) -> Tuned:
    laws = {batch: fit_steps(_turns(result.rounds, batch), seed=batch) for batch in _sizes(result)}
    accepted = fit_acceptance(result.rounds)
    speedup = {batch: speedups(law, accepted) for batch, law in laws.items()}
    max_batch = max(laws)
    table = choose_table(speedup, max_batch)
    return Tuned(
        provenance=Provenance.of_this_run(),
        target=subject.target,
        drafter=subject.drafter,
        dtype=result.dtype,
        block_size=subject.block_size,
        runner=result.runner,
        max_batch=max_batch,
        verify={batch: _verify_seconds(law) for batch, law in laws.items()},
        draft={batch: _seconds(law.draft, law) for batch, law in laws.items()},
        acceptance=Acceptance(
            tokens={k: found.interval() for k, found in accepted.tokens.items()},
            by_position=[found.interval() for found in accepted.by_position],
            requests=accepted.requests,
            steps=accepted.steps,
        ),
        speedup=speedup,
        prefill_bare=fit_prefill([s for each in result.rounds for s in each.prefill_bare]),
        prefill_drafting=fit_prefill([s for each in result.rounds for s in each.prefill_drafting]),
        table=table.ranges(),
        break_even=table.break_even,
        loses_above=table.loses_above,
    )


def speedups(law: StepLaw, accepted: Accepted) -> dict[int, Interval]:
    """Tokens of a step over its length in bare steps, by K; both uncertain."""
    measured = sorted(set(accepted.tokens) & set(law.draft) & set(law.verify))
    return {k: (accepted.tokens[k] / law.step(k)).interval() for k in measured}


def _verify_seconds(law: StepLaw) -> dict[int, Interval]:
    return {**_seconds(law.verify, law), 0: law.bare.interval()}


def _seconds(curve: Mapping[int, Sampled], law: StepLaw) -> dict[int, Interval]:
    """The spread is that of the ratio to a bare step: machines drift, ratios much less."""
    bare = law.bare.values[0].item()
    return {place: found.interval().times(bare) for place, found in curve.items()}


def _turns(rounds: Sequence[RoundResult], batch: int) -> list[Turn]:
    return [turn for each in rounds if each.batch == batch for turn in each.turns]


def _sizes(result: CalibrationResult) -> list[int]:
    return sorted({each.batch for each in result.rounds})
