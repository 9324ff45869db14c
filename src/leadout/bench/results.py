"""Measured rounds on disk, and the result that is computed from them.

`RoundsFile` keeps every measured cell as soon as it is there; `summarize` turns the cells into a
`BenchResult`: speed-ups, latencies, acceptance and predictions.

The speed-up of a round is an arm's rate divided by the geometric mean of the rates of both bare
servers in the same round; that of a cell is the geometric mean over its rounds, with a bootstrap
interval. The ratio of the two bare servers, which are alike, shows the error of the method.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from leadout.bench.predict import CostModel, Served, predicted_speedup, share_close
from leadout.bench.settings import BenchError
from leadout.bench.setup import BARE, BARE_AGAIN, Arm, BenchSetup, Cell
from leadout.engine.load_test import LoadResult
from leadout.engine.server_turns import Turns
from leadout.errors import shown
from leadout.files import (
    FileError,
    MissingFileError,
    first_problem,
    read_lines,
    read_model,
    write_text,
)
from leadout.provenance import Provenance
from leadout.stats import Ratio, Spread, paired_ratio, percentile, spread

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
    processor_ratio: float | None  # of processor seconds per token: bare vLLM's over the arm's
    seconds: float
    processor_seconds: float
    output_tokens: int
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
    speedup: float | None  # geometric mean over rounds; None for bare vLLM itself
    low: float | None  # 95% interval of the speed-up; None with too few rounds
    high: float | None
    processor_ratio: Ratio | None  # the speed-up by processor seconds instead of the clock
    tokens_per_second: Spread
    processor_seconds_per_token: Spread
    acceptance_length: float | None  # None where nothing was drafted
    acceptance_by_position: list[float]
    ttft: Latency | None  # None if no request started in the measured windows
    tpot: Latency
    itl: Latency
    predicted_speedup: float | None = None
    rounds: list[RoundNumbers]


class MeanSpeedup(_Record):
    """Geometric mean over the prompt sets."""

    concurrency: int
    arm: str
    speedup: float
    low: float | None
    high: float | None
    pairs: int
    processor_ratio: Ratio


class BareAgainstBare(_Record):
    """The error of the method: two servers that are alike, geometric mean over the prompt sets."""

    concurrency: int
    ratio: float  # 1 if there is no error
    low: float | None
    high: float | None
    pairs: int
    processor_ratio: Ratio


class PredictionSummary(_Record):
    cells: int
    within_15_percent: float  # share of them


class BenchResult(_Record):
    provenance: Provenance
    settings: BenchSetup
    cells: list[CellResult]
    geometric_means: list[MeanSpeedup]
    bare_against_bare: list[BareAgainstBare]
    prediction: PredictionSummary | None

    @property
    def arms(self) -> list[str]:
        return [arm.name for arm in self.settings.arms]

    @property
    def compared_arms(self) -> list[str]:
        """All but both bare ones."""
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
        return [m for m in self.geometric_means if m.low is not None and m.low > 1]

    @property
    def outcome(self) -> Outcome | None:
        """Whether drafting pays at any concurrency; None if there is nothing to compare."""
        if not self.geometric_means:
            return None
        if self.faster:
            return "faster"
        ends = [mean.high for mean in self.geometric_means]
        is_slower = all(high is not None and high < 1 for high in ends)
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
        if setup.turns != "single":
            # Pairs are measured together: what a kill left of one is measured again.
            done = _complete(done, len(setup.arms))
        write_text(self._folder / SETTINGS, setup.model_dump_json(indent=2) + "\n")
        # Drops a last line that a kill has truncated, so that the next one starts on its own line.
        write_text(self._path, "".join(each.model_dump_json() + "\n" for each in done))
        return done

    def turns(self) -> Turns | None:
        """How the servers of the earlier runs took turns; None if nothing was measured."""
        return self._earlier_setup().turns if self.read() else None

    def read(self) -> list[Measured]:
        try:
            lines = list(read_lines(self._path))
        except MissingFileError:
            return []
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                found.append(Measured.model_validate_json(line))
            except ValidationError as problem:
                if number == len(lines):  # truncated by a kill
                    break
                raise BenchError(
                    f"{self._path}, line {number} is not a measured cell "
                    f"({first_problem(problem, 'line')}): remove the line, or use another folder."
                ) from None
        return found

    def append(self, measured: Sequence[Measured]) -> None:
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write("".join(each.model_dump_json() + "\n" for each in measured))

    def _earlier_setup(self) -> BenchSetup:
        path = self._folder / SETTINGS
        try:
            return read_model(path, BenchSetup)
        except FileError:
            raise BenchError(
                f"{path} is missing or not the setup of a bench, so that {self._path} cannot be "
                "continued: use another folder."
            ) from None

    def _require_same(self, setup: BenchSetup) -> None:
        earlier = self._earlier_setup()
        if setup.can_continue(earlier):
            return
        ours, theirs = setup.model_dump(), earlier.model_dump()
        name = next(name for name in ours if name != "rounds" and ours[name] != theirs[name])
        raise BenchError(
            f"--resume: {name} is {shown(ours[name])}, but the rounds in {self._folder} were "
            f"measured with {shown(theirs[name])}: use the same, or another folder."
        )


def _complete(measured: Sequence[Measured], arms: int) -> list[Measured]:
    counts = Counter(each.cell.pair for each in measured)
    return [each for each in measured if counts[each.cell.pair] == arms]


def summarize(
    setup: BenchSetup,
    measured: Sequence[Measured],
    provenance: Provenance,
    model: CostModel | None = None,
) -> BenchResult:
    """Everything measured so far; cells without a round are left out."""
    cells = []
    for prompt_set in setup.prompts:
        for concurrency in setup.concurrencies:
            loads = {
                arm.name: _loads(measured, prompt_set, concurrency, arm.name) for arm in setup.arms
            }
            cells += [
                _cell(prompt_set, concurrency, arm, loads, setup, model)
                for arm in setup.arms
                if loads[arm.name]
            ]
    return BenchResult(
        provenance=provenance,
        settings=setup.without_folders(),
        cells=cells,
        geometric_means=_means(setup, cells),
        bare_against_bare=_bare_against_bare(setup, cells),
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
    prompt_set: str,
    concurrency: int,
    arm: Arm,
    by_arm: Mapping[str, Loads],
    setup: BenchSetup,
    model: CostModel | None,
) -> CellResult:
    loads = by_arm[arm.name]
    numbers = [_numbers(number, loads[number], by_arm, arm) for number in loads]
    speedup = _ratio([numbers], "speedup")
    length = _acceptance_length(loads)
    first_tokens = [seconds for load in loads.values() for seconds in load.ttfts]
    return CellResult(
        prompt_set=prompt_set,
        concurrency=concurrency,
        arm=arm.name,
        speedup=None if speedup is None else speedup.value,
        low=None if speedup is None else speedup.low,
        high=None if speedup is None else speedup.high,
        processor_ratio=_ratio([numbers], "processor_ratio"),
        tokens_per_second=spread([load.tokens_per_second for load in loads.values()]),
        processor_seconds_per_token=spread(
            [load.processor_seconds_per_token for load in loads.values()]
        ),
        acceptance_length=length,
        acceptance_by_position=_by_position(loads),
        ttft=_latency(first_tokens) if first_tokens else None,
        tpot=_latency([seconds for load in loads.values() for seconds in load.tpots]),
        itl=Latency(
            median=1000 * statistics.median(load.itl_median for load in loads.values()),
            p99=1000 * statistics.median(load.itl_p99 for load in loads.values()),
        ),
        predicted_speedup=_predicted(arm, concurrency, loads, length, setup, model),
        rounds=numbers,
    )


def _ratio(by_set: Sequence[Sequence[RoundNumbers]], name: str) -> Ratio | None:
    """None unless every set has a round with this ratio."""
    found = [
        [value for each in rounds if (value := getattr(each, name)) is not None]
        for rounds in by_set
    ]
    return paired_ratio(found) if found and all(found) else None


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


def _numbers(number: int, load: LoadResult, by_arm: Mapping[str, Loads], arm: Arm) -> RoundNumbers:
    drafting = load.drafting
    # Bare vLLM is compared with itself: the second server with the first.
    references = {BARE: (), BARE_AGAIN: (BARE,)}.get(arm.name, (BARE, BARE_AGAIN))
    bare = [by_arm[name][number] for name in references if number in by_arm.get(name, {})]
    is_paired = bool(references) and len(bare) == len(references)
    return RoundNumbers(
        round=number,
        tokens_per_second=load.tokens_per_second,
        speedup=load.tokens_per_second / _mean([each.tokens_per_second for each in bare])
        if is_paired
        else None,
        processor_ratio=_mean([each.processor_seconds_per_token for each in bare])
        / load.processor_seconds_per_token
        if is_paired
        else None,
        seconds=load.seconds,
        processor_seconds=load.processor_seconds,
        output_tokens=load.output_tokens,
        requests=load.requests,
        prompt_tokens=load.prompt_tokens,
        ttft_ms=[round(1000 * seconds, 2) for seconds in load.ttfts],
        tpot_ms=[round(1000 * seconds, 3) for seconds in load.tpots],
        drafts=0 if drafting is None else drafting.drafts,
        draft_tokens=0 if drafting is None else drafting.draft_tokens,
        accepted=0 if drafting is None else drafting.accepted,
    )


def _mean(values: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(statistics.fmean(map(math.log, values)))


def _predicted(
    arm: Arm,
    concurrency: int,
    loads: Loads,
    length: float | None,
    setup: BenchSetup,
    model: CostModel | None,
) -> float | None:
    """None where the cost model is not that of this arm's drafter."""
    if model is None or not model.covers(arm):
        return None
    if arm.kind == "tuned" and model.never_drafts:
        return 1.0  # `leadout serve` then starts bare vLLM
    started = sum(len(load.ttfts) for load in loads.values())
    tokens = setup.output_tokens
    if setup.stop_at_end_of_text and started:
        tokens = max(2, sum(load.output_tokens for load in loads.values()) // started)
    served = Served(
        concurrency=concurrency,
        prompt_tokens=sum(load.prompt_tokens for load in loads.values()) / max(1, started),
        output_tokens=tokens,
    )
    return predicted_speedup(model, served, model.draft_tokens(arm, concurrency), length or 1.0)


def _by_set(cells: Sequence[CellResult], concurrency: int, arm: str) -> list[list[RoundNumbers]]:
    return [cell.rounds for cell in cells if (cell.concurrency, cell.arm) == (concurrency, arm)]


def _means(setup: BenchSetup, cells: Sequence[CellResult]) -> list[MeanSpeedup]:
    means = []
    for concurrency in setup.concurrencies:
        for arm in setup.arms:
            rounds = _by_set(cells, concurrency, arm.name)
            speedup = _ratio(rounds, "speedup")
            processor = _ratio(rounds, "processor_ratio")
            if arm.is_bare or speedup is None or processor is None:
                continue
            means.append(
                MeanSpeedup(
                    concurrency=concurrency,
                    arm=arm.name,
                    speedup=speedup.value,
                    low=speedup.low,
                    high=speedup.high,
                    pairs=speedup.pairs,
                    processor_ratio=processor,
                )
            )
    return means


def _bare_against_bare(setup: BenchSetup, cells: Sequence[CellResult]) -> list[BareAgainstBare]:
    found = []
    for concurrency in setup.concurrencies:
        rounds = _by_set(cells, concurrency, BARE_AGAIN)
        ratio, processor = _ratio(rounds, "speedup"), _ratio(rounds, "processor_ratio")
        if ratio is not None and processor is not None:
            found.append(
                BareAgainstBare(
                    concurrency=concurrency,
                    ratio=ratio.value,
                    low=ratio.low,
                    high=ratio.high,
                    pairs=ratio.pairs,
                    processor_ratio=processor,
                )
            )
    return found


def _prediction(cells: Sequence[CellResult]) -> PredictionSummary | None:
    pairs = [
        (cell.predicted_speedup, cell.speedup)
        for cell in cells
        if cell.predicted_speedup is not None and cell.speedup is not None
    ]
    if not pairs:
        return None
    return PredictionSummary(cells=len(pairs), within_15_percent=share_close(pairs))
