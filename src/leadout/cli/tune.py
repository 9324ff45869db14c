"""`leadout tune`: how many tokens to draft at each load, on this machine."""

from pathlib import Path
from typing import Annotated

import typer


def tune(
    target: Annotated[str, typer.Argument(help="Folder or hub name of the target.")],
    drafter: Annotated[str, typer.Argument(help="Folder or hub name of the drafter.")],
    out: Annotated[Path, typer.Option(help="File for `leadout serve --tuned`.")] = Path(
        "tuned.json"
    ),
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="A .jsonl file of prompts like your traffic; may be repeated."),
    ] = None,
    max_batch: Annotated[
        int, typer.Option(min=1, help="The most requests at a time to measure.")
    ] = 16,
    dtype: Annotated[str, typer.Option(help="Precision of target and drafter.")] = "auto",
    plan: Annotated[
        bool, typer.Option("--plan", help="Tell how long it takes; measure nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure a pair and write how many tokens to draft at each batch size.

    A page with plots is written beside the file.
    """
    from leadout.cli import options as needs
    from leadout.console import Progress

    needs.require("tune")

    from leadout.checkpoints import CheckpointError
    from leadout.control.tuned_file import write_tuned
    from leadout.data.chat import TemplateError
    from leadout.data.prompts import PromptError
    from leadout.engine.child_process import EngineError
    from leadout.models import ModelNotFoundError
    from leadout.tune.report import print_tuned, write_page
    from leadout.tune.run import plan as make_plan
    from leadout.tune.run import tune as make_tuned
    from leadout.tune.settings import TuneError, TuneRequest

    if out.is_dir() or not out.parent.is_dir():
        typer.echo(
            f"error: --out {out}: found no folder to write this file into, wanted a file name in a "
            "folder that exists",
            err=True,
        )
        raise typer.Exit(2)
    request = TuneRequest(target, drafter, tuple(prompts or ()), max_batch, dtype)
    page = out.with_suffix(".html")
    try:
        if plan:
            planned = make_plan(request)
            typer.echo(planned.model_dump_json(indent=2) if as_json else planned.text())
            return
        with Progress("tune") as progress:
            tuned = make_tuned(request, progress)
        write_tuned(tuned, out)
        write_page(tuned, out, page)
    except (CheckpointError, ModelNotFoundError, PromptError, TemplateError, TuneError) as problem:
        typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(2) from None
    except EngineError as problem:
        typer.echo(f"leadout tune: {problem}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(tuned.model_dump_json(indent=2))
    else:
        print_tuned(tuned, out, page)
