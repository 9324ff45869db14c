"""`leadout convert`: rewrite a drafter checkpoint in the other published format."""

import shutil
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
        typer.Option(
            metavar="NAME", help="Name or local folder of the target, if SOURCE does not name it."
        ),
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Draft only the N most frequent tokens; requires --frequent-in and --target.",
        ),
    ] = None,
    frequent_in: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Folder of `leadout data` in which to count token frequencies."
        ),
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Pad heads to N dimensions, without another effect, for engines that need it "
            "(TPUs: 128).",
        ),
    ] = None,
) -> None:
    """Rewrite a drafter so that vLLM serves it as trained.

    Without --head-dim and --draft-vocab the weights stay bit-identical.
    """
    from leadout import checkpoints
    from leadout.files import replacing, require_writable
    from leadout.train.export import SETTINGS

    require_writable("DESTINATION", destination)
    covered = None
    if head_dim is not None:
        written = _with_head_dim(source, destination, to, target, draft_vocab, head_dim)
    elif draft_vocab is None:
        written = checkpoints.convert(source, destination, to, target)
    else:
        written, covered = _with_draft_vocab(
            source, destination, to, target, draft_vocab, frequent_in
        )
    if (source / SETTINGS).exists():  # `leadout learn` continues with the settings of the training
        with replacing(written.path / SETTINGS) as temporary:
            shutil.copyfile(source / SETTINGS, temporary)
    typer.echo(f"wrote {written.path} ({written.format})")
    if covered is not None:
        typer.echo(f"{draft_vocab} tokens can be drafted: {covered:.1%} of the target's answers")
    for note in written.notes:
        typer.echo(f"note: {note}")
    pair = target or written.target_name or "TARGET"
    typer.echo(f"next: leadout check {pair} {written.path}", err=True)


def _with_head_dim(
    source: Path,
    destination: Path,
    to: Literal["zlab", "speculators"],
    target: str | None,
    draft_vocab: int | None,
    head_dim: int,
) -> "Checkpoint":
    from leadout.checkpoints.widen import widen_heads
    from leadout.settings import SettingsError

    if draft_vocab is not None:
        raise SettingsError("--head-dim cannot be combined with --draft-vocab: convert twice.")
    return widen_heads(source, destination, to, head_dim, target)


def _with_draft_vocab(
    source: Path,
    destination: Path,
    to: str,
    target: str | None,
    draft_vocab: int,
    frequent_in: Path | None,
) -> "tuple[Checkpoint, float]":
    from leadout.data.manifest import DataFolder
    from leadout.models import local_folder
    from leadout.settings import SettingsError
    from leadout.train.init import reduce_draft_vocab

    if to != "speculators":
        raise SettingsError(
            f"--draft-vocab requires --to speculators: the {to} format has no draft vocabulary."
        )
    if target is None or frequent_in is None:
        missing = "--target" if target is None else "--frequent-in"
        raise SettingsError(
            f"--draft-vocab requires {missing}: the rows come from the target's head, their choice "
            "from its answers."
        )
    samples = DataFolder(frequent_in).samples()
    answers = (samples[index].response for index in range(len(samples)))
    return reduce_draft_vocab(source, destination, local_folder(target), answers, draft_vocab)
