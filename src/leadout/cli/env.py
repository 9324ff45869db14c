"""`leadout env`: what is installed here, and what can be done with it."""

import typer


def env(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show versions, hardware, the vLLM model runner, and which commands are usable."""
    from leadout.cli.options import NEEDS
    from leadout.environment import collect, render

    report = collect(NEEDS)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        render(report)
