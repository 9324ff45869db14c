"""`leadout data`: the target's answers to prompts, as training data for its drafter."""

from typing import Annotated

import typer

from leadout.cli.options import require, settings_of


def data(
    context: typer.Context,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted job.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Let the target answer prompts, and write the answers as training data for its drafter.

    Flags after `--` go to vLLM, for example `-- --tensor-parallel-size 8`. With --endpoint, servers
    answer, and vLLM need not be installed here.
    """
    from leadout.data.settings import DataSettings

    settings = settings_of(context, DataSettings, vllm_flags=tuple(context.args))
    require("data --endpoint" if settings.endpoint else "data")

    from leadout.console import Progress
    from leadout.data.generate import generate_data, print_summary

    with Progress("data") as progress:
        manifest = generate_data(settings, resume=resume, progress=progress)
    if as_json:
        typer.echo(manifest.model_dump_json(indent=2))
    else:
        print_summary(manifest, settings)
