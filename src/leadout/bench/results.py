"""Measured rounds on disk, and the result that is computed from them.

`RoundsFile` keeps every measured cell as soon as it is there; `summarize` turns the cells into a
`BenchResult`: speed-ups paired within rounds, spreads, latencies, acceptance and predictions.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from leadout.bench.predict import CostModel, Served, predicted_speedup, share_close
from leadout.bench.settings import BenchError
from leadout.bench.setup import BARE, Arm, BenchSetup, Cell
from leadout.engine.load_test import LoadResult
from leadout.files import write_text
from leadout.provenance import Provenance
from leadout.stats import Spread, geometric_mean, percentile, ratios, spread

ROUNDS, SETTINGS = "rounds.jsonl", "settings.json"
Loads = dict[int, LoadResult]  # by round
Outcome = Literal["faster", "slower", "undecided"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Latency(_Record):
    """In milliseconds."""

    median: float
    p99: float


class RoundNumbers(_Record):
    """One measured load."""

    round: int
    tokens_per_second: float
    speedup: float | None  # over bare vLLM in the same round
    seconds: float
    requests: int
    prompt_tokens: int
    ttft_ms: list[float]  # by request
    tpot_ms: list[float]
    drafts: int
    draft_tokens: int
    accepted: int


class CellResult(_Record):
    """One arm on one prompt set at one concurrency."""

    prompt_set: str
    concurrency: int
    arm: str
    speedup: float | None  # median over rounds; None for bare vLLM itself
    speedup_spread: Spread | None
    tokens_per_second: Spread
    acceptance_length: float | None  # None where nothing was drafted
    acceptance_by_position: list[float]
    ttft: Latency
    tpot: Latency
    itl: Latency
    predicted_speedup: float | None = None
    rounds: list[RoundNumbers]


class MeanSpeedup(_Record):
    """Geometric mean over the prompt sets."""

    concurrency: int
    arm: str
    speedup: float
    speedup_spread: Spread


class PredictionSummary(_Record):
    cells: int
    within_15_percent: float  # share of them


class BenchResult(_Record):
    provenance: Provenance
    settings: BenchSetup
    cells: list[CellResult]
    geometric_means: list[MeanSpeedup]
    prediction: PredictionSummary | None

    @property
    def arms(self) -> list[str]:
        return [arm.name for arm in self.settings.arms]

    @property
    def compared_arms(self) -> list[str]:
        """All but bare vLLM."""
        return [arm.name for arm in self.settings.arms if not arm.is_bare]

    def cell(self, prompt_set: str, concurrency: int, arm: str) -> CellResult | None:
        key = (prompt_set, concurrency, arm)
        return next((c for c in self.cells if (c.prompt_set, c.concurrency, c.arm) == key), None)

    def mean(self, concurrency: int, arm: str) -> MeanSpeedup | None:
        key = (concurrency, arm)
        return next((m for m in self.geometric_means if (m.concurrency, m.arm) == key), None)

    @property
    def faster(self) -> list[MeanSpeedup]:
        """Means whose 95% interval is above 1."""
        return [m for m in self.geometric_means if (m.speedup_spread.interval or (0.0,))[0] > 1]

    @property
    def outcome(self) -> Outcome | None:
        """Whether drafting pays at any concurrency; None if there is nothing to compare."""
        if not self.geometric_means:
            return None
        if self.faster:
            return "faster"
        intervals = [mean.speedup_spread.interval for mean in self.geometric_means]
        is_slower = all(interval is not None and interval[1] < 1 for interval in intervals)
        return "slower" if is_slower else "undecided"


class Measured(_Record):
    cell: Cell
    load: LoadResult


class RoundsFile:
    """`rounds.jsonl` in the output folder, one cell per line, with the setup in `settings.json`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / ROUNDS

    def begin(self, setup: BenchSetup, *, resume: bool) -> list[Measured]:
        """What earlier runs have measured; without `resume` there must be nothing."""
        done = self.read()
        if done and not resume:
            raise BenchError(
                f"--out {self._folder} has the rounds of an earlier bench: add --resume to "
                "continue it, or choose another folder."
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        if done:
            self._require_same(setup)
        write_text(self._folder / SETTINGS, setup.model_dump_json(indent=2) + "\n")
        # Drops a last line that a kill has truncated, so that the next one starts on its own line.
        write_text(self._path, "".join(each.model_dump_json() + "\n" for each in done))
        return done

    def read(self) -> list[Measured]:
        if not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8").splitlines()
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                found.append(Measured.model_validate_json(line))
            except ValidationError as problem:
                if number == len(lines):  # truncated by a kill
                    break
                raise BenchError(
                    f"{self._path}, line {number} is not a measured cell "
                    f"({problem.errors()[0]['msg']}): remove the line, or use another folder."
                ) from None
        return found

    def append(self, measured: Measured) -> None:
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(measured.model_dump_json() + "\n")

    def _require_same(self, setup: BenchSetup) -> None:
        path = self._folder / SETTINGS
        try:
            earlier = BenchSetup.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            raise BenchError(
                f"{path} is missing or not the setup of a bench, so that {self._path} cannot be "
                "continued: use another folder."
            ) from None
        if setup.can_continue(earlier):
            return
        ours, theirs = setup.model_dump(), earlier.model_dump()
        name = next(name for name in ours if name != "rounds" and ours[name] != theirs[name])
        raise BenchError(
            f"--resume: {name} is {ours[name]!r}, but the rounds in {self._folder} were measured "
            f"with {theirs[name]!r}: use the same, or another folder."
        )


def summarize(
    setup: BenchSetup, measured: Sequence[Measured], model: CostModel | None = None
) -> BenchResult:
    """Everything measured so far; cells without a round are left out."""
    cells = []
    for prompt_set in setup.prompts:
        for concurrency in setup.concurrencies:
            loads = {
                arm.name: _loads(measured, prompt_set, concurrency, arm.name) for arm in setup.arms
            }
            cells += [
                _cell(prompt_set, concurrency, arm, loads[arm.name], loads[BARE], model)
                for arm in setup.arms
                if loads[arm.name]
            ]
    return BenchResult(
        provenance=Provenance.of_this_run(),
        settings=setup.without_folders(),
        cells=cells,
        geometric_means=_means(setup, cells),
        prediction=_prediction(cells),
    )


def _loads(measured: Sequence[Measured], prompt_set: str, concurrency: int, arm: str) -> Loads:
    key = (prompt_set, concurrency, arm)
    return {
        each.cell.round: each.load
        for each in sorted(measured, key=lambda each: each.cell.round)
        if (each.cell.prompt_set, each.cell.concurrency, each.cell.arm) == key
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
    """Over all drafted blocks, so that a round with more of them weighs more."""
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
    """None where the cost model is not that of this arm's drafter."""
    if model is None or not model.covers(arm):
        return None
    if arm.kind == "tuned" and model.never_drafts:
        return 1.0  # `leadout serve` then starts bare vLLM
    requests = sum(load.requests for load in loads.values())
    served = Served(
        concurrency=concurrency,
        prompt_tokens=sum(load.prompt_tokens for load in loads.values()) / requests,
        output_tokens=sum(load.output_tokens for load in loads.values()) // requests,
    )
    return predicted_speedup(model, served, model.draft_tokens(arm, concurrency), length or 1.0)


def _means(setup: BenchSetup, cells: Sequence[CellResult]) -> list[MeanSpeedup]:
    means = []
    for concurrency in setup.concurrencies:
        for arm in setup.arms:
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
