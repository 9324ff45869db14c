"""`leadout inspect`: what is in a drafter checkpoint."""

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    drafter: Annotated[
        Path, typer.Argument(help="Folder of a drafter in z-lab or speculators format.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a drafter's sizes, its connection to the target, and how other tools read it."""
    from rich.console import Console

    from leadout.checkpoints import read_checkpoint
    from leadout.checkpoints.checkpoint import describe
    from leadout.console import facts_table

    description = describe(read_checkpoint(drafter))
    if as_json:
        typer.echo(description.model_dump_json(indent=2))
        return
    typer.echo(description.path)
    Console().print(facts_table(description.lines()))
