"""`leadout tune`: how many tokens to draft at each load, on this machine."""

from typing import Annotated

import typer

from leadout.cli.options import require, settings_of
from leadout.errors import NEGATIVE


def tune(
    context: typer.Context,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what would be measured and how long it takes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure a pair, and write how many tokens to draft at each batch size.

    Starts two servers, without and with the drafter. All other flags are passed on to vLLM: give
    those that you will serve with. Exits with 0 if drafting pays at some batch size, with 1 if the
    pair is better served without the drafter.
    """
    require("tune")

    from leadout.console import Progress
    from leadout.control.tuned_file import write_tuned
    from leadout.tune import report, run
    from leadout.tune.settings import TuneSettings

    settings = settings_of(context, TuneSettings, server_flags=tuple(context.args))
    if plan:
        planned = run.plan(settings)
        typer.echo(planned.model_dump_json(indent=2) if as_json else planned.text())
        return
    with Progress("tune") as progress:
        tuned = run.tune(settings, progress)
    page = settings.out.with_suffix(".html")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    write_tuned(tuned, settings.out)
    report.write_page(tuned, settings.out, page)
    if as_json:
        typer.echo(tuned.model_dump_json(indent=2))
    else:
        report.print_tuned(tuned, settings.out, page)
    if tuned.max_drafts == 0:
        raise typer.Exit(NEGATIVE)
