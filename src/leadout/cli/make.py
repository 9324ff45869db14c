"""`leadout make`: a checked and tuned drafter for a target, or the reason why it does not pay."""

from typing import Annotated

import typer

from leadout.cli.options import require, settings_of


def make(
    context: typer.Context,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Only print what would be done, with sizes and times."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Make a drafter for a target: data, training, check, tuning and a report.

    First it measures what drafting costs on this machine, and stops if a drafter of this budget is
    not expected to pay. Run the same command again to continue after an interruption. Flags after
    `--` go to every vLLM engine. Exit codes: 0 the drafter pays, 1 it does not, or does not fit, 2
    it could not be made, 3 undecided.
    """
    from leadout.make.settings import MakeSettings

    settings = settings_of(context, MakeSettings, vllm_flags=tuple(context.args))
    require("make")

    from leadout.console import Progress
    from leadout.make import run
    from leadout.make.result import print_result

    if plan:
        planned = run.plan(settings)
        typer.echo(planned.model_dump_json(indent=2) if as_json else planned.text())
        return
    with Progress("make") as progress:
        result = run.make(settings, progress)
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    else:
        print_result(result)
    raise typer.Exit(result.exit_code)
