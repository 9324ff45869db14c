"""The result of a bench: one object for people, machines, tables and the page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from leadout.bench.predict import CostModel, Served, predicted_speedup, share_close
from leadout.bench.settings import BARE, Arm, BenchError, BenchSettings, Cell
from leadout.engine.load_test import LoadResult
from leadout.files import replacing
from leadout.provenance import Provenance
from leadout.stats import Spread, geometric_mean, percentile, ratios, spread


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Latency(_Record):
    """In milliseconds."""

    median: float
    p99: float


class RoundNumbers(_Record):
    """One load, as it was measured."""

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
    speedup: float | None  # median over rounds; none for bare vLLM itself
    speedup_spread: Spread | None
    tokens_per_second: Spread
    acceptance_length: float | None  # none where nothing was drafted
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
    settings: BenchSettings
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
        wanted = (prompt_set, concurrency, arm)
        found = (c for c in self.cells if (c.prompt_set, c.concurrency, c.arm) == wanted)
        return next(found, None)

    def mean(self, concurrency: int, arm: str) -> MeanSpeedup | None:
        wanted = (concurrency, arm)
        return next((m for m in self.geometric_means if (m.concurrency, m.arm) == wanted), None)


# The measured cells of a bench, a JSON line each, written as soon as one is there.

ROUNDS, SETTINGS = "rounds.jsonl", "settings.json"


class Measured(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    cell: Cell
    load: LoadResult


class RoundsFile:
    """`rounds.jsonl` in the out folder; settings.json beside it says what was measured."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / ROUNDS

    def begin(self, settings: BenchSettings, *, resume: bool) -> list[Measured]:
        """What earlier runs have measured; without `resume` there must be nothing."""
        done = self.read()
        if done and not resume:
            raise BenchError(
                f"--out {self._folder}: found the rounds of an earlier bench, wanted an empty "
                "folder; add --resume to go on with them, or choose another folder"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        if done:
            self._require_same(settings)
        settings.write(self._folder / SETTINGS)
        # A line that a kill has cut is written anew, so that the next one starts on its own.
        with replacing(self._path) as temporary:
            temporary.write_text("".join(each.model_dump_json() + "\n" for each in done))
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
                if number == len(lines):  # cut by a kill
                    break
                raise BenchError(
                    f"{self._path}, line {number}: found {problem.errors()[0]['msg']}, wanted a "
                    "measured cell; remove the line, or begin in another folder"
                ) from None
        return found

    def append(self, measured: Measured) -> None:
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(measured.model_dump_json() + "\n")

    def _require_same(self, settings: BenchSettings) -> None:
        path = self._folder / SETTINGS
        try:
            earlier = BenchSettings.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            raise BenchError(
                f"{path}: found no settings of an earlier bench, wanted those of {self._path}; "
                "begin in another folder"
            ) from None
        if settings.goes_on_from(earlier):
            return
        ours, theirs = settings.model_dump(), earlier.model_dump()
        name = next(name for name in ours if name != "rounds" and ours[name] != theirs[name])
        raise BenchError(
            f"--resume: found {name} {ours[name]!r}, wanted that of the rounds in {self._folder}: "
            f"{theirs[name]!r}; ask for the same, or begin in another folder"
        )


# From measured rounds to the result: speed-ups, spreads, latencies, acceptance, predictions.

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
