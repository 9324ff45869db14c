"""The result of a bench: one object for people, machines, tables and the page."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from leadout.bench.settings import BenchSettings
from leadout.bench.statistics import Spread
from leadout.provenance import Provenance


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
