"""`leadout convert`: rewrite a drafter checkpoint in the other published format."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from leadout.checkpoints import Checkpoint


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
    draft_vocab: Annotated[
        int | None,
        typer.Option(help="Draft only so many frequent tokens; needs --frequent-in and --target."),
    ] = None,
    frequent_in: Annotated[
        Path | None, typer.Option(help="Folder of `leadout data`: what the target writes.")
    ] = None,
) -> None:
    """Rewrite a drafter so that vLLM serves it as it was trained; weights stay as they are."""
    from leadout import checkpoints

    covered = None
    try:
        if draft_vocab is None:
            written = checkpoints.convert(source, destination, to, target)
        else:
            written, covered = _narrowed(source, destination, to, target, draft_vocab, frequent_in)
    except ValueError as problem:
        typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"wrote {written.path} ({written.format})")
    if covered is not None:
        typer.echo(f"{draft_vocab} tokens can be drafted: {covered:.1%} of the target's answers")
    for note in written.notes:
        typer.echo(f"note: {note}")


def _narrowed(
    source: Path,
    destination: Path,
    to: str,
    target: str | None,
    draft_vocab: int,
    frequent_in: Path | None,
) -> "tuple[Checkpoint, float]":
    from leadout.data.manifest import DataFolder
    from leadout.models import local_folder
    from leadout.train.draft_vocab import reduce_draft_vocab

    if to != "speculators":
        raise ValueError(
            f"--to: found {to}, wanted speculators: the z-lab format has no draft vocabulary"
        )
    if target is None or frequent_in is None:
        missing = "--target" if target is None else "--frequent-in"
        raise ValueError(
            f"{missing}: found none, wanted it with --draft-vocab: the rows come from the "
            "target's head, the choice from its answers; give both"
        )
    samples = DataFolder(frequent_in).samples()
    answers = (samples[index].response for index in range(len(samples)))
    return reduce_draft_vocab(source, destination, local_folder(target), answers, draft_vocab)
