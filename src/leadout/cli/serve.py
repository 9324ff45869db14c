"""`leadout serve`: a vLLM server with a drafter that fits, or the reason why it does not."""

from typing import Annotated

import typer

from leadout.cli.options import require, settings_of


def serve(
    context: typer.Context,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the command of the server and stop.")
    ] = False,
) -> None:
    """Check that the drafter fits the target, and start a vLLM server with it.

    All other flags are passed on to vLLM. Exit code 1: the drafter does not fit.
    """
    import os
    import resource
    import shlex

    require("serve")

    from leadout.engine.settings import ServeSettings

    settings = settings_of(context, ServeSettings, vllm_flags=tuple(context.args))
    server_environment = dict(os.environ)
    # While planning, vLLM logs errors only, and not to stdout, where the command is printed.
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}

    from leadout.engine.process_folders import folder_for_sockets
    from leadout.engine.serve_plan import make_plan

    typer.echo("leadout: checking target, drafter and flags (takes some seconds)", err=True)
    made = make_plan(settings)
    for note in made.notes:
        typer.echo(f"leadout: {note}", err=True)
    if plan:
        assignments = [f"{name}={shlex.quote(value)}" for name, value in made.environment.items()]
        typer.echo(" ".join([*assignments, shlex.join(made.command)]))
        return
    if settings.learn_states is not None:
        # Nothing that users wrote is stored then, also if the server crashes. Its processes inherit
        # the limit; they stay dumpable, without which GPUs could not share memory among them.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    environment = server_environment | made.environment | folder_for_sockets()
    # Replaces this process: its id and its signals become the server's.
    os.execve(made.command[0], made.command, environment)
