"""`leadout convert`: rewrite a drafter checkpoint in the other published format."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def convert(
    source: Annotated[
        Path, typer.Argument(help="Folder of a drafter in z-lab or speculators format.")
    ],
    destination: Annotated[Path, typer.Argument(help="New folder to write.")],
    to: Annotated[Literal["zlab", "speculators"], typer.Option(help="The format to write.")],
    target: Annotated[
        str | None,
        typer.Option(help="The target's name or local folder, where the source does not name it."),
    ] = None,
) -> None:
    """Rewrite a drafter so that vLLM serves it as it was trained; weights stay as they are."""
    from leadout import checkpoints

    try:
        written = checkpoints.convert(source, destination, to, target)
    except checkpoints.CheckpointError as problem:
        typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"wrote {written.path} ({written.format})")
    for note in written.notes:
        typer.echo(f"note: {note}")
