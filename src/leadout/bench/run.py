"""The measuring: every arm's server is started once, then cell after cell gets its load."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from leadout.bench.arms import arm_command
from leadout.bench.plan import Cell, Rates, all_cells
from leadout.bench.prompts import PromptSet, write_prompts
from leadout.bench.request import Progress
from leadout.bench.rounds import Measured, RoundsFile
from leadout.bench.settings import Arm, BenchSettings
from leadout.engine.load import LoadError, LoadRequest, LoadResult
from leadout.engine.load_generator import LoadGenerator
from leadout.engine.server import Server

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
        except LoadError as problem:
            raise LoadError(f"{arm}: {problem} (log: {self.servers[arm].log})") from None


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
