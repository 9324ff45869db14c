"""The commands: each parses its flags, calls its package and prints the result.

Heavy imports stay inside the functions, so that `leadout --help` answers at once.
"""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from leadout.cli.options import NEEDS, require, settings_of
from leadout.errors import NEGATIVE, SUCCESS, UNDECIDED

if TYPE_CHECKING:
    from pydantic import BaseModel

Drafter = Annotated[
    Path, typer.Argument(help="Folder of a drafter in z-lab or speculators format.")
]
FormatName = Literal["zlab", "speculators"]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
OneObject = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Plan = Annotated[
    bool, typer.Option("--plan", help="Print what would be measured and how long it takes.")
]

BENCH_EXIT_CODES = {None: SUCCESS, "faster": SUCCESS, "slower": NEGATIVE, "undecided": UNDECIDED}


def _show(result: "BaseModel", as_json: bool, show: Callable[[], object]) -> None:
    """Print a result as JSON, or let `show` print it."""
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    else:
        show()


def serve(
    context: typer.Context,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the command of the server and stop.")
    ] = False,
) -> None:
    """Check that the drafter fits the target, and start a vLLM server with it.

    All other flags are passed on to vLLM. Exit code 1: the drafter does not fit.
    """
    require("serve")

    from leadout.engine.serve_settings import ServeSettings

    settings = settings_of(context, ServeSettings, vllm_flags=tuple(context.args))
    server_environment = dict(os.environ)
    # While planning, vLLM logs errors only, and not to stdout, where the command is printed.
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}

    from leadout.engine.serve_plan import make_plan

    typer.echo("leadout: checking target, drafter and flags (takes some seconds)", err=True)
    made = make_plan(settings)
    for note in made.notes:
        typer.echo(f"leadout: {note}", err=True)
    if plan:
        assignments = [f"{name}={shlex.quote(value)}" for name, value in made.environment.items()]
        typer.echo(" ".join([*assignments, shlex.join(made.command)]))
        return
    # Replaces this process: its id and its signals become the server's.
    os.execve(made.command[0], made.command, server_environment | made.environment)


def tune(context: typer.Context, plan: Plan = False, as_json: Json = False) -> None:
    """Measure a pair, and write how many tokens to draft at each batch size.

    Exits with 0 if drafting pays at some batch size, with 1 if the pair is better served without
    the drafter.
    """
    require("tune")

    from leadout.console import Progress
    from leadout.control.tuned_file import write_tuned
    from leadout.tune import report, run
    from leadout.tune.settings import TuneSettings

    settings = settings_of(context, TuneSettings)
    if plan:
        planned = run.plan(settings)
        _show(planned, as_json, lambda: typer.echo(planned.text()))
        return
    with Progress("tune") as progress:
        tuned = run.tune(settings, progress)
    page = settings.out.with_suffix(".html")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    write_tuned(tuned, settings.out)
    report.write_page(tuned, settings.out, page)
    _show(tuned, as_json, lambda: report.print_tuned(tuned, settings.out, page))
    if tuned.max_drafts == 0:
        raise typer.Exit(NEGATIVE)


def check(
    context: typer.Context,
    as_json: Json = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the changes tried even if the pair fits.")
    ] = False,
) -> None:
    """Check that a drafter fits a target, or find the cause why it does not.

    Exit codes: 0 the pair fits, 1 it does not, 2 the check could not run, 3 undecided: it runs,
    but something should be looked into first.
    """
    from leadout.check.settings import CheckSettings

    settings = settings_of(context, CheckSettings)
    if not settings.static:
        require("check")

    from leadout.check.report import print_result
    from leadout.check.run import check as run_check
    from leadout.console import Progress

    with Progress("check") as progress:
        result = run_check(settings, progress)
    written = [path for path in (settings.report, settings.save) if path is not None]
    _show(result, as_json, lambda: print_result(result, written=written, verbose=verbose))
    if as_json:
        for path in written:
            typer.echo(f"wrote {path}", err=True)
    raise typer.Exit(result.verdict.exit_code)


def bench(context: typer.Context, plan: Plan = False, as_json: Json = False) -> None:
    """Measure throughput and latency with a drafter against bare vLLM.

    Starts one server per arm and loads them in turns with vLLM's own load generator. Flags after
    `--` go to every server, for example `-- --max-model-len 4096`. Exits with 0 if drafting is
    faster at some concurrency, 1 if it is slower at all of them, 3 if the rounds do not tell.
    """
    require("bench")

    from leadout.bench import page, report, run
    from leadout.bench.settings import BenchSettings
    from leadout.console import Progress

    settings = settings_of(context, BenchSettings, server_flags=tuple(context.args))
    if plan:
        with Progress("bench") as progress:
            planned = run.plan(settings, progress)
        _show(planned, as_json, lambda: report.print_plan(planned))
        return
    with Progress("bench") as progress:
        result = run.bench(settings, progress)
    written = page.write_files(result, settings.out)
    _show(result, as_json, lambda: report.print_result(result))
    if not as_json:
        report.print_written(written, report.next_command(settings, result))
    raise typer.Exit(BENCH_EXIT_CODES[result.outcome])


def data(
    context: typer.Context,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted job.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Let the target answer prompts, and write the answers as training data for its drafter."""
    require("data")

    from leadout.console import Progress
    from leadout.data.generate import generate_data, print_summary
    from leadout.data.settings import DataSettings

    settings = settings_of(context, DataSettings)
    with Progress("data") as progress:
        manifest = generate_data(settings, resume=resume, progress=progress)
    _show(manifest, as_json, lambda: print_summary(manifest, settings))


def train(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Folder or hub name of the target.")],
    data: Annotated[Path, typer.Option(help="Folder that `leadout data` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the run and the drafter.")],
    config: Annotated[
        Path | None, typer.Option(help="YAML file with settings; flags override it.")
    ] = None,
    to: Annotated[
        FormatName, typer.Option("--format", help="File format of the drafter.", show_default=True)
    ] = "zlab",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the run in --out, with its settings, where it stopped."
        ),
    ] = False,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Only estimate time, memory, disk and acceptance, from a few steps."
        ),
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a drafter and verify its acceptance in vLLM.

    For several processes or machines, start it with torchrun: torchrun --nproc-per-node 8 -m
    leadout train ...
    """
    require("train")

    from leadout.train import command
    from leadout.train.config import TrainConfig
    from leadout.train.export import SETTINGS

    if resume and config is None and (out / SETTINGS).exists():
        config = out / SETTINGS
    settings = settings_of(context, TrainConfig, config)
    if plan:
        planned = command.plan(target, data, settings)
        if planned is not None:  # only the leading rank reports
            typer.echo(planned.model_dump_json(indent=2) if as_json else planned.text())
        return
    report = command.train(
        target, data, out, settings, to=to, resume=resume, tensorboard=tensorboard
    )
    if report is not None:
        typer.echo(report.model_dump_json(indent=2) if as_json else report.text())
        typer.echo(command.what_next(report, target, out), err=True)


def learn(
    context: typer.Context,
    status: Annotated[
        bool, typer.Option("--status", help="Show versions and decisions; trains nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Adapt the serving drafter to captured traffic; publish it if it is significantly better.

    Servers started with --registry swap it in automatically. Exit code 1: the candidate was
    rejected; 3: too little traffic. To train in several processes, start it with torchrun:
    torchrun --nproc-per-node 8 -m leadout learn ...
    """
    from leadout.learn.config import LearnConfig

    config = settings_of(context, LearnConfig)
    if status:
        from leadout.learn.report import print_status, read_status

        found = read_status(config.registry)
        _show(found, as_json, lambda: print_status(found))
        return
    require("learn")
    if config.start is not None:
        from leadout.learn.promote import start_registry

        target = config.required("target")
        started = start_registry(target, config.registry, config.start)
        created = (
            f"Created {config.registry}; version {started.version} is {config.start}.\n"
            f"Next: leadout serve {target} --registry {config.registry} --capture DIR"
        )
        _show(started, as_json, lambda: typer.echo(created))
        return

    from leadout.learn.cycle import learn as run_cycle
    from leadout.learn.report import print_result

    result = run_cycle(config, show_progress=True)
    if result is None:  # only the leading rank reports
        return
    candidate = config.work_folder / "candidate"
    _show(result, as_json, lambda: print_result(result, config.registry, candidate))
    if not result.promoted:
        raise typer.Exit(NEGATIVE)


def inspect(drafter: Drafter, as_json: OneObject = False) -> None:
    """Show a drafter's sizes, its connection to the target, and how other tools read it."""
    from rich.console import Console

    from leadout.checkpoints import read_checkpoint
    from leadout.checkpoints.describe import describe
    from leadout.console import facts_table

    description = describe(read_checkpoint(drafter))
    if as_json:
        typer.echo(description.model_dump_json(indent=2))
        return
    typer.echo(description.path)
    Console().print(facts_table(description.lines()))


def convert(
    source: Drafter,
    destination: Annotated[Path, typer.Argument(help="New folder to write.")],
    to: Annotated[FormatName, typer.Option(help="The format to write.")],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name or local folder of the target, if SOURCE does not name it."
        ),
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Draft only the N most frequent tokens; requires --frequent-in and --target.",
        ),
    ] = None,
    frequent_in: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Folder of `leadout data` in which to count token frequencies."
        ),
    ] = None,
) -> None:
    """Rewrite a drafter so that vLLM serves it as trained; the weights stay bit-identical."""
    from leadout import checkpoints
    from leadout.files import require_writable
    from leadout.settings import SettingsError

    require_writable("DESTINATION", destination)
    covered: float | None = None
    if draft_vocab is None:
        written = checkpoints.convert(source, destination, to, target)
    elif to != "speculators":
        raise SettingsError(
            f"--draft-vocab requires --to speculators: the {to} format has no draft vocabulary."
        )
    elif target is None or frequent_in is None:
        missing = "--target" if target is None else "--frequent-in"
        raise SettingsError(
            f"--draft-vocab requires {missing}: the rows come from the target's head, their choice "
            "from its answers."
        )
    else:
        from leadout.data.manifest import DataFolder
        from leadout.models import local_folder
        from leadout.train.draft_vocab import reduce_draft_vocab

        samples = DataFolder(frequent_in).samples()
        answers = (samples[index].response for index in range(len(samples)))
        written, covered = reduce_draft_vocab(
            source, destination, local_folder(target), answers, draft_vocab
        )
    typer.echo(f"wrote {written.path} ({written.format})")
    if covered is not None:
        typer.echo(f"{draft_vocab} tokens can be drafted: {covered:.1%} of the target's answers")
    for note in written.notes:
        typer.echo(f"note: {note}")
    pair = target or written.target_name or "TARGET"
    typer.echo(f"next: leadout check {pair} {written.path}", err=True)


def env(as_json: OneObject = False) -> None:
    """Show versions, hardware, the vLLM model runner and which commands can run."""
    from leadout.environment import collect, render

    report = collect(NEEDS)
    _show(report, as_json, lambda: render(report))
