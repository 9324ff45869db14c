"""Which known cause, undone, would raise acceptance: named with numbers and the exact edit."""

from __future__ import annotations

from collections.abc import Sequence

from leadout.check.findings import Evidence, Finding, Gravity
from leadout.check.hypotheses import HYPOTHESES, Hypothesis, Surroundings, Variant
from leadout.check.probe import Trial
from leadout.dflash.config import DrafterConfig

# Gains below this are not worth an edit, significant or not.
SMALLEST_GAIN = 0.01
# A better setting explains a drafter that hardly works only if it brings most of it back.
GRAVE_GAIN = 0.25


def variants_of(
    config: DrafterConfig, around: Surroundings, hypotheses: Sequence[Hypothesis] = HYPOTHESES
) -> list[Variant]:
    return [variant for each in hypotheses for variant in each.variants(config, around)]


def layers_needed(config: DrafterConfig, target_layers: int) -> set[int]:
    """Every layer that a hypothesis may tap."""
    near = {i + shift for i in config.target_layer_ids for shift in (-1, 0, 1)}
    return {layer for layer in near if 0 <= layer < target_layers}


def findings_of(trials: Sequence[Trial]) -> list[Finding]:
    """One finding for each cause whose undoing raises acceptance, the largest gain first."""
    found: dict[str, Finding] = {}
    whole = max((trial.texts for trial in trials), default=0)
    for trial in trials:  # the best first
        if trial.texts < whole:
            continue  # only screened: few texts make large gains by chance
        cause = trial.variant.cause
        gain = trial.gain
        if cause in found or not gain.is_significant or gain.relative < SMALLEST_GAIN:
            continue
        found[cause] = Finding(
            name=cause,
            gravity=_gravity(trial),
            message=(
                f"{trial.variant.edit} raises acceptance from {gain.before:.3f} to "
                f"{gain.after:.3f} on the same positions ({gain.relative:+.1%})"
            ),
            evidence=_evidence(trial),
            remedy=f"Make this edit, or let --fix write it: {trial.variant.edit}.",
        )
    return list(found.values())


def repair_of(trials: Sequence[Trial]) -> Variant | None:
    """The variant to write: the best one that is no mere note, if it gains enough."""
    for trial in trials:  # the best first
        if _gravity(trial) is not Gravity.NOTE:
            enough = trial.gain.is_significant and trial.gain.relative >= SMALLEST_GAIN
            return trial.variant if enough else None
    return None


def _gravity(trial: Trial) -> Gravity:
    if trial.gain.relative >= GRAVE_GAIN:
        return Gravity.UNFIT
    return Gravity.NOTE if trial.variant.may_be_meant else Gravity.DOUBTFUL


def _evidence(trial: Trial) -> Evidence:
    gain = trial.gain
    return {
        "before": gain.before,
        "after": gain.after,
        "gain": gain.difference.value,
        "gain_low": gain.difference.low,
        "gain_high": gain.difference.high,
        "edit": trial.variant.edit,
    }
