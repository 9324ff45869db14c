"""`leadout selftest`: whether Leadout works on this machine, with this pair and these flags."""

from typing import Annotated

import typer

from leadout.cli.options import require, settings_of


def selftest(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Prove on this machine that Leadout works with this pair, and what it costs.

    Starts stock vLLM and servers with parts of Leadout, one after the other, and writes one file
    with all results, to be attached to an issue. All other flags are passed on to vLLM. Exits with
    0 if every check passes or is not applicable, with 1 if one fails.
    """
    require("selftest")

    from leadout.console import Progress
    from leadout.selftest.result import print_result
    from leadout.selftest.run import selftest as run_selftest
    from leadout.selftest.settings import SelftestSettings

    settings = settings_of(context, SelftestSettings, vllm_flags=tuple(context.args))
    with Progress("selftest") as progress:
        result = run_selftest(settings, progress)
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    else:
        print_result(result)
    typer.echo(f"wrote {settings.out}", err=True)
    raise typer.Exit(result.exit_code)
