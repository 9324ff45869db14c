"""`leadout serve`: a vLLM server with a drafter that fits, or the reason why it does not."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class IfUnfit(StrEnum):
    REFUSE = "refuse"
    BARE = "bare"


def serve(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(help="Folder or hub name of the target, or a speculators checkpoint.")
    ],
    draft: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of the drafter; 'auto': a published one."),
    ] = None,
    tuned: Annotated[
        Path | None,
        typer.Option(help="File that `leadout tune` wrote: how much to draft at which load."),
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Choose how much to draft at every step, by what it gains."),
    ] = False,
    registry: Annotated[
        Path | None,
        typer.Option(help="Registry of `leadout learn`: serve the version it points to, and swap."),
    ] = None,
    capture: Annotated[
        Path | None,
        typer.Option(help="Folder to keep token ids of finished requests in; off without."),
    ] = None,
    capture_rate: Annotated[
        float,
        typer.Option(min=0.0001, max=1.0, help="Share of the requests to capture."),
    ] = 1.0,
    plan: Annotated[bool, typer.Option("--plan", help="Print the command and stop.")] = False,
    if_unfit: Annotated[
        IfUnfit, typer.Option(help="Refuse to serve, or serve without speculation.")
    ] = IfUnfit.REFUSE,
) -> None:
    """Check the pair, fill in what is missing, and become `vllm serve`.

    Every other flag goes to vLLM as it is.
    """
    import os
    import shlex

    from leadout.cli import options as needs

    needs.require("serve")
    servers_environment = dict(os.environ)
    # While planning, vLLM speaks only of errors, and not where the command is printed.
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}

    from leadout.checkpoints import CheckpointError
    from leadout.control.tuned_file import TunedFileError
    from leadout.engine.pair import UnfitPairError
    from leadout.engine.serve_plan import Request, make_plan
    from leadout.engine.settings import CaptureSettings
    from leadout.models import ModelNotFoundError

    typer.echo("leadout: examining target, drafter and settings, some seconds", err=True)
    kept = None
    if capture is not None:
        kept = CaptureSettings(folder=capture.resolve(), rate=capture_rate)
    request = Request(
        target, draft, if_unfit.value, tuple(context.args), tuned, live, registry, kept
    )
    try:
        made = make_plan(request)
    except (UnfitPairError, CheckpointError, ModelNotFoundError, TunedFileError) as problem:
        typer.echo(f"leadout serve refuses: {problem}", err=True)
        raise typer.Exit(2) from None
    for note in made.notes:
        typer.echo(f"leadout: {note}", err=True)
    if plan:
        assignments = [f"{name}={shlex.quote(value)}" for name, value in made.environment.items()]
        typer.echo(" ".join([*assignments, shlex.join(made.command)]))
        return
    # The same process from here on: its id and signals are the server's.
    os.execve(made.command[0], made.command, servers_environment | made.environment)
