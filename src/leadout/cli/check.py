"""`leadout check`: does this drafter fit this target, and if not, why?"""

from typing import Annotated

import typer

from leadout.cli.options import require, settings_of


def check(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the changes tried even if the pair fits.")
    ] = False,
) -> None:
    """Check that a drafter fits a target, or find out why it does not.

    Flags after `--` go to every vLLM engine, for example `-- --tensor-parallel-size 4`. Exit codes:
    0 the pair fits, 1 it does not, 2 the check could not run, 3 undecided: there were
    too few texts, or something should be looked into first.
    """
    from leadout.check.settings import CheckSettings

    settings = settings_of(context, CheckSettings, vllm_flags=tuple(context.args))
    if not settings.static:
        require("check")

    from leadout.check.report import print_result
    from leadout.check.run import check as run_check
    from leadout.console import Progress

    with Progress("check") as progress:
        result = run_check(settings, progress)
    written = [path for path in (settings.report, settings.save) if path is not None]
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
        for path in written:
            typer.echo(f"wrote {path}", err=True)
    else:
        print_result(result, written=written, verbose=verbose)
    raise typer.Exit(result.verdict.exit_code)
