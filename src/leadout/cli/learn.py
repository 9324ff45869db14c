"""`leadout learn`: one cycle of adapting a drafter to its traffic, or what came of earlier ones.

Every field of the learn config is a flag; they are added to the command's own below.
"""

from pathlib import Path
from typing import Annotated

import typer

from leadout.cli.options import settings_of


def learn(
    context: typer.Context,
    registry: Annotated[Path, typer.Option(help="Folder of the drafter's versions.")],
    target: Annotated[
        str | None, typer.Argument(help="Folder or hub name of the target; not for --status.")
    ] = None,
    traffic: Annotated[
        Path | None, typer.Option(help="Folder that `leadout serve --capture` writes.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Folder of `leadout data`: the drafter's original text.")
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="Begin a registry with this drafter; nothing is trained.")
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder to work in; unset: `work` in the registry's folder."),
    ] = None,
    status: Annotated[
        bool, typer.Option("--status", help="Show versions and decisions; train nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Adapt the serving drafter to captured traffic, and publish it if it is surely better.

    Servers with --registry swap it in by themselves. For several processes, start it with
    torchrun: torchrun --nproc-per-node 8 -m leadout learn ...
    """
    if status:
        _show_status(registry, as_json)
        return
    from leadout.cli import options as needs

    needs.require("learn")

    from leadout.console import Progress
    from leadout.learn.config import LearnConfig, LearnError, LearnRequest
    from leadout.learn.cycle import learn as carry_out
    from leadout.learn.promote import start_registry
    from leadout.learn.report import print_result

    if target is None:
        raise LearnError("TARGET is required: the folder or hub name of the served target.")
    if start is not None:
        begun = start_registry(target, registry, start)
        typer.echo(begun.model_dump_json(indent=2) if as_json else begun.text())
        return
    config = settings_of(context, LearnConfig)
    if traffic is None or replay is None:
        missing = "--traffic" if traffic is None else "--replay"
        raise LearnError(f"{missing} is required. See `leadout learn --help`.")
    place = work or registry / "work"
    request = LearnRequest(target, registry, traffic, replay, place, config)
    result = carry_out(request, lambda: Progress("learn"))
    if result is None:  # only the leading rank speaks
        return
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    else:
        print_result(result)


def _show_status(registry: Path, as_json: bool) -> None:
    from leadout.learn.report import print_status, read_status

    found = read_status(registry)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        print_status(found)
