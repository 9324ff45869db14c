"""From measured rounds to the result: speed-ups, spreads, latencies, acceptance, predictions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from leadout.bench.predict import CostModel, Served, predicted_speedup, share_close
from leadout.bench.result import (
    BenchResult,
    CellResult,
    Latency,
    MeanSpeedup,
    PredictionSummary,
    RoundNumbers,
)
from leadout.bench.rounds import Measured
from leadout.bench.settings import BARE, Arm, BenchSettings
from leadout.bench.statistics import geometric_mean, percentile, ratios, spread
from leadout.engine.load import LoadResult
from leadout.provenance import Provenance

Loads = dict[int, LoadResult]  # by round


def summarize(
    settings: BenchSettings, measured: Sequence[Measured], model: CostModel | None = None
) -> BenchResult:
    """All that was measured so far; a cell without a round is left out."""
    cells = []
    for prompt_set in settings.prompts:
        for concurrency in settings.concurrencies:
            loads = {
                arm.name: _loads(measured, prompt_set, concurrency, arm.name)
                for arm in settings.arms
            }
            cells += [
                _cell(prompt_set, concurrency, arm, loads[arm.name], loads[BARE], model)
                for arm in settings.arms
                if loads[arm.name]
            ]
    return BenchResult(
        provenance=Provenance.of_this_run(),
        settings=settings.without_folders(),
        cells=cells,
        geometric_means=_means(settings, cells),
        prediction=_prediction(cells),
    )


def _loads(measured: Sequence[Measured], prompt_set: str, concurrency: int, arm: str) -> Loads:
    wanted = (prompt_set, concurrency, arm)
    return {
        each.cell.round: each.load
        for each in sorted(measured, key=lambda each: each.cell.round)
        if (each.cell.prompt_set, each.cell.concurrency, each.cell.arm) == wanted
    }


def _cell(
    prompt_set: str, concurrency: int, arm: Arm, loads: Loads, bare: Loads, model: CostModel | None
) -> CellResult:
    speedups = {} if arm.is_bare else ratios(_rates(loads), _rates(bare))
    over_rounds = spread(list(speedups.values())) if speedups else None
    length = _acceptance_length(loads)
    return CellResult(
        prompt_set=prompt_set,
        concurrency=concurrency,
        arm=arm.name,
        speedup=None if over_rounds is None else over_rounds.median,
        speedup_spread=over_rounds,
        tokens_per_second=spread(list(_rates(loads).values())),
        acceptance_length=length,
        acceptance_by_position=_by_position(loads),
        ttft=_latency([seconds for load in loads.values() for seconds in load.ttfts]),
        tpot=_latency([seconds for load in loads.values() for seconds in load.tpots]),
        itl=Latency(
            median=1000 * statistics.median(load.itl_median for load in loads.values()),
            p99=1000 * statistics.median(load.itl_p99 for load in loads.values()),
        ),
        predicted_speedup=_predicted(arm, concurrency, loads, length, model),
        rounds=[_numbers(number, load, speedups.get(number)) for number, load in loads.items()],
    )


def _rates(loads: Loads) -> dict[int, float]:
    return {number: load.tokens_per_second for number, load in loads.items()}


def _latency(seconds: Sequence[float]) -> Latency:
    return Latency(median=1000 * statistics.median(seconds), p99=1000 * percentile(seconds, 99))


def _acceptance_length(loads: Loads) -> float | None:
    drafting = [load.drafting for load in loads.values() if load.drafting is not None]
    drafts = sum(each.drafts for each in drafting)
    return 1 + sum(each.accepted for each in drafting) / drafts if drafts else None


def _by_position(loads: Loads) -> list[float]:
    """Of all drafted blocks; a round with more of them weighs more."""
    drafting = [load.drafting for load in loads.values() if load.drafting is not None]
    drafts = sum(each.drafts for each in drafting)
    positions = max((len(each.by_position) for each in drafting), default=0)
    return [
        sum(each.by_position[p] * each.drafts for each in drafting if p < len(each.by_position))
        / drafts
        for p in range(positions)
    ]


def _numbers(number: int, load: LoadResult, speedup: float | None) -> RoundNumbers:
    drafting = load.drafting
    return RoundNumbers(
        round=number,
        tokens_per_second=load.tokens_per_second,
        speedup=speedup,
        seconds=load.seconds,
        requests=load.requests,
        prompt_tokens=load.prompt_tokens,
        ttft_ms=[round(1000 * seconds, 2) for seconds in load.ttfts],
        tpot_ms=[round(1000 * seconds, 3) for seconds in load.tpots],
        drafts=0 if drafting is None else drafting.drafts,
        draft_tokens=0 if drafting is None else drafting.draft_tokens,
        accepted=0 if drafting is None else drafting.accepted,
    )


def _predicted(
    arm: Arm, concurrency: int, loads: Loads, length: float | None, model: CostModel | None
) -> float | None:
    """None where the model knows nothing of this arm's drafter."""
    if model is None or not model.knows(arm):
        return None
    if arm.kind == "tuned" and model.never_drafts:
        return 1.0  # such a table is served as bare vLLM
    requests = sum(load.requests for load in loads.values())
    served = Served(
        concurrency=concurrency,
        prompt_tokens=sum(load.prompt_tokens for load in loads.values()) / requests,
        output_tokens=sum(load.output_tokens for load in loads.values()) // requests,
    )
    return predicted_speedup(model, served, model.draft_tokens(arm, concurrency), length or 1.0)


def _means(settings: BenchSettings, cells: Sequence[CellResult]) -> list[MeanSpeedup]:
    means = []
    for concurrency in settings.concurrencies:
        for arm in settings.arms:
            own = [c for c in cells if (c.concurrency, c.arm) == (concurrency, arm.name)]
            by_set = [
                {r.round: r.speedup for r in cell.rounds if r.speedup is not None} for cell in own
            ]
            values = list(geometric_mean(by_set).values())
            if values:
                over_rounds = spread(values)
                means.append(
                    MeanSpeedup(
                        concurrency=concurrency,
                        arm=arm.name,
                        speedup=over_rounds.median,
                        speedup_spread=over_rounds,
                    )
                )
    return means


def _prediction(cells: Sequence[CellResult]) -> PredictionSummary | None:
    pairs = [
        (cell.predicted_speedup, cell.speedup)
        for cell in cells
        if cell.predicted_speedup is not None and cell.speedup is not None
    ]
    if not pairs:
        return None
    return PredictionSummary(cells=len(pairs), within_15_percent=share_close(pairs))
