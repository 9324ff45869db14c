"""`leadout env`: versions, hardware and usable commands."""

import typer


def env(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show versions, hardware, the vLLM model runner and which commands can run."""
    from leadout.cli.options import NEEDS
    from leadout.environment import collect, render

    report = collect(NEEDS)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        render(report)
