"""`leadout inspect`: what a drafter checkpoint is, before anything is run with it."""

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    drafter: Annotated[
        Path, typer.Argument(help="Folder of a drafter in z-lab or speculators format.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a drafter's shape, its wiring to the target, and how others would read it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from leadout.checkpoints import CheckpointError, read_checkpoint
    from leadout.checkpoints.describe import describe

    try:
        description = describe(read_checkpoint(drafter))
    except CheckpointError as problem:
        typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(description.model_dump_json(indent=2))
        return
    typer.echo(description.path)
    table = Table(box=box.SIMPLE, show_header=False)
    for label, text in description.lines():
        table.add_row(label, Text(text))
    Console().print(table)
