"""Ten cycles of candidates that each lose 2% on the base: how much is lost in total, by gate.

    python experiments/gate_cycles.py results/learn/gate_noise.json \
        --out results/learn/gate_cycles.json

A simulation with the noise of real candidates, in which the product's own code compares and
decides. A sequence of the simulated traffic is one of the measured file; a candidate changes the
acceptance length on it by the given mean and a deviation that a real candidate had from its mean
on some sequence. Deviations stay with a version, as they do in reality, so the noise of the
comparison with version 1 grows with every promotion.

Gates: `leadout learn` today; its rule before (lower bounds, compared with the serving version
alone, always the same 60 base sequences); and the same comparison by point estimates. Where
candidates lose, all of them pass on new traffic, so that the base alone decides.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from common import SHIPPED, write_result
from leadout.check.result import Lossless
from leadout.evaluate.acceptance import TextAcceptance
from leadout.learn.config import CycleSettings
from leadout.learn.data import POOL_CYCLES
from leadout.learn.gate import Comparison, Evidence, compare, decide
from leadout.models import fingerprint
from leadout.stats import Floats, Interval

SETTINGS = CycleSettings()
REPETITIONS, CYCLES = 200, 10
REPETITIONS_EQUAL, REPETITIONS_TRAFFIC = 40, 100
TRAFFIC_GAIN = 0.05
OLD_SEQUENCES, OLD_GAIN = 60, 0.03
HELD_OUT = (50, 100, 200, 400)  # newest requests: from the minimum to the maximum of a cycle
EQUAL = Lossless(texts=16, equal_texts=16, divergences=[], largest_allowed_gap=0.0)
QUANTILES = (0.025, 0.5, 0.975)


@dataclass(frozen=True, slots=True)
class Measured:
    """What real candidates did on real sequences of one part."""

    tokens: Floats  # [sequences] of the answer
    lengths: Floats  # [sequences] acceptance length of version 1
    deviations: Floats  # [pairs of versions * sequences] of log ratios from their mean

    @classmethod
    def read(cls, rows: list[dict[str, Any]]) -> Measured:
        steps = np.array([row["steps"] for row in rows], dtype=np.float64)  # [sequences, versions]
        tokens = np.array([row["accepted"] for row in rows], dtype=np.float64) + steps
        usable = steps[:, 0] >= 10  # a shorter answer has hardly any acceptance length
        steps, tokens = steps[usable], tokens[usable]
        lengths = tokens / steps
        ratios = np.diff(np.log(lengths), axis=1)  # of each version to the one before
        weights = steps[:, :1] / steps[:, :1].sum()
        deviations = ratios - (weights * ratios).sum(0)
        return cls(tokens[:, 0], lengths[:, 0], deviations.flatten())


class Simulated:
    """Sequences with the acceptance of every version on them."""

    def __init__(self, measured: Measured, count: int, draw: np.random.Generator) -> None:
        self._measured, self._draw = measured, draw
        drawn = draw.integers(len(measured.tokens), size=count)
        self.tokens, self.first = measured.tokens[drawn], measured.lengths[drawn]

    def candidate(self, parent: Floats, change: float) -> Floats:
        """Acceptance lengths [sequences] of a version trained from another one."""
        noise = self._draw.choice(self._measured.deviations, len(parent))
        # Over all text, the number of steps and so the change stay as they are.
        noise += np.log(np.mean(np.exp(-self._measured.deviations)))
        return np.maximum(1.0, parent * (1 + change) * np.exp(noise))

    def texts(self, lengths: Floats, part: Any = slice(None)) -> list[TextAcceptance]:
        import torch

        found = []
        for tokens, length in zip(self.tokens[part], lengths[part], strict=True):
            steps = max(1, round(tokens / length))
            spread = np.full(steps, (tokens - steps) // steps, dtype=np.int64)
            spread[: int((tokens - steps) % steps)] += 1
            found.append(TextAcceptance("base", 0, torch.empty(0), spread.tolist()))
        return found


Gate = Callable[[Evidence], bool]


def of_today(evidence: Evidence) -> bool:
    return decide(evidence, SETTINGS).passed


def before(evidence: Evidence) -> bool:
    assert evidence.traffic is not None
    assert evidence.base is not None
    limits = (OLD_GAIN, -SETTINGS.base_loss)
    changes = (evidence.traffic.change, evidence.base.change)
    return all(change.low >= limit for change, limit in zip(changes, limits, strict=True))


def by_estimates(evidence: Evidence) -> bool:
    assert evidence.traffic is not None
    assert evidence.base is not None
    limits = (OLD_GAIN, -SETTINGS.base_loss)
    changes = (evidence.traffic.change, evidence.base.change)
    return all(change.value >= limit for change, limit in zip(changes, limits, strict=True))


GATES: dict[str, tuple[Gate, int, bool]] = {  # base sequences, and whether they rotate
    "today": (of_today, SETTINGS.base_sequences, True),
    "before": (before, OLD_SEQUENCES, False),
    "point estimates": (by_estimates, OLD_SEQUENCES, False),
}


def run(
    gate: str,
    parts: dict[str, Measured],
    draw: np.random.Generator,
    *,
    base_change: float,
    held_out: int | None,
    cycles: int = CYCLES,
) -> tuple[float, list[bool]]:
    """The true change on the base after all cycles, and which cycles promoted their candidate.

    Without `held_out` the gain on new traffic is certain.
    """
    passes, count, rotates = GATES[gate]
    pool = Simulated(parts["base"], count * (POOL_CYCLES if rotates else 1), draw)
    serving, total, promoted = pool.first, 1.0, []
    for number in range(cycles):
        candidate = pool.candidate(serving, base_change)
        start = number * count % len(serving)
        part = slice(start, start + count)
        earlier, later = pool.texts(serving, part), pool.texts(candidate, part)
        base = compare(earlier, later)
        evidence = Evidence(
            findings=[],
            traffic=traffic_comparison(parts["traffic"], held_out, draw),
            base=base,
            first=compare(pool.texts(pool.first, part), later) if gate == "today" else base,
            lossless=EQUAL,
        )
        promoted.append(passes(evidence))
        if promoted[-1]:
            serving, total = candidate, total * (1 + base_change)
    return total - 1, promoted


def traffic_comparison(
    measured: Measured, held_out: int | None, draw: np.random.Generator
) -> Comparison:
    if held_out is None:
        length, gain = (
            Interval(value=value, low=value, high=value) for value in (2.0, TRAFFIC_GAIN)
        )
        return Comparison(requests=400, before=length, after=length, change=gain)
    newest = Simulated(measured, held_out, draw)
    candidate = newest.candidate(newest.first, TRAFFIC_GAIN)
    return compare(newest.texts(newest.first), newest.texts(candidate))


def summary(runs: list[tuple[float, list[bool]]]) -> dict[str, Any]:
    changes = [change for change, _ in runs]
    return {
        "total_base_change": dict(
            zip(map(str, QUANTILES), np.quantile(changes, QUANTILES).tolist(), strict=True)
        ),
        "worst": min(changes),
        "promoted_mean": float(np.mean([sum(promoted) for _, promoted in runs])),
        "pass_rate_by_cycle": np.mean([promoted for _, promoted in runs], axis=0).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("candidates", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    source = json.loads(arguments.candidates.read_text())
    if source["provenance"]["models"]["drafter"] != fingerprint(SHIPPED):
        raise SystemExit(f"{arguments.candidates} is not of {SHIPPED.name}: measure it again.")
    parts = {name: Measured.read(source[name]) for name in ("base", "traffic")}

    def repeated(gate: str, repetitions: int, **settings: Any) -> list[tuple[float, list[bool]]]:
        return [
            run(gate, parts, np.random.default_rng(seed), **settings)
            for seed in track(range(repetitions), description=f"{gate} {settings}")
        ]

    losing = {
        gate: summary(repeated(gate, REPETITIONS, base_change=-0.02, held_out=None))
        for gate in GATES
    }
    equal = repeated("today", REPETITIONS_EQUAL, base_change=0.0, held_out=None)
    pass_rates = [
        {"gate": gate, "held_out": count, "rate": summary(runs)["promoted_mean"]}
        for gate in ("today", "before")
        for count in HELD_OUT
        for runs in [repeated(gate, REPETITIONS_TRAFFIC, base_change=0.0, held_out=count, cycles=1)]
    ]
    write_result(
        arguments.out,
        {
            "candidates": arguments.candidates.name,
            "settings": SETTINGS.model_dump(include={"gain", "base_loss", "base_sequences"}),
            "base_sequences": {gate: count for gate, (_, count, _) in GATES.items()},
            "cycles": CYCLES,
            "repetitions": {
                "losing": REPETITIONS,
                "equal": REPETITIONS_EQUAL,
                "pass_rates": REPETITIONS_TRAFFIC,
            },
            "sequences_measured": {name: len(part.tokens) for name, part in parts.items()},
            "deviation": {name: float(part.deviations.std()) for name, part in parts.items()},
            "loss_each_cycle": 0.02,
            "losing": losing,
            "equal_on_base": summary(equal),
            "traffic_gain": TRAFFIC_GAIN,
            "pass_rates": pass_rates,
        },
        drafter=SHIPPED,
    )


if __name__ == "__main__":
    main()
