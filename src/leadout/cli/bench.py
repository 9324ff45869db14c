"""`leadout bench`: how much faster than bare vLLM, and at which load."""

from typing import Annotated

import typer

from leadout.cli.options import require, settings_of
from leadout.errors import NEGATIVE, SUCCESS, UNDECIDED

EXIT_CODES = {None: SUCCESS, "faster": SUCCESS, "slower": NEGATIVE, "undecided": UNDECIDED}


def bench(
    context: typer.Context,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what would be measured and how long it takes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure throughput and latency with a drafter against bare vLLM.

    Starts one server per arm, two of them without a drafter, which take turns under constant load.
    Flags after `--` go to every server, for example `-- --max-model-len 4096`. Exits with 0 if
    drafting is faster at some concurrency, 1 if it is slower at all of them, 3 if the rounds do
    not tell.
    """
    require("bench")

    from leadout.bench import page, report, run
    from leadout.bench.settings import BenchSettings
    from leadout.console import Progress

    settings = settings_of(context, BenchSettings, server_flags=tuple(context.args))
    with Progress("bench") as progress:
        if plan:
            planned = run.plan(settings)
        else:
            result = run.bench(settings, progress)
    if plan:
        typer.echo(planned.model_dump_json(indent=2)) if as_json else report.print_plan(planned)
        return
    written = page.write_files(result, settings.out)
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    else:
        report.print_result(result)
        report.print_written(written, report.next_command(settings, result))
    raise typer.Exit(EXIT_CODES[result.outcome])
