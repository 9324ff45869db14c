"""`leadout train`: a drafter for a target, from the target's own answers."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from leadout.cli.options import require, settings_of


def train(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Folder or hub name of the target.")],
    data: Annotated[Path, typer.Option(help="Folder that `leadout data` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the run and the drafter.")],
    config: Annotated[
        Path | None, typer.Option(help="YAML file with settings; flags override it.")
    ] = None,
    to: Annotated[
        Literal["zlab", "speculators"] | None,
        typer.Option(
            "--format",
            help="File format of the drafter. [default: zlab; speculators with --draft-vocab]",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the run in --out, with its settings, where it stopped."
        ),
    ] = False,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Only estimate time, memory and disk, from a few steps."),
    ] = False,
    tracker: Annotated[
        list[str] | None,
        typer.Option(
            help="Also report to tensorboard, wandb, mlflow or trackio; repeatable.",
            metavar="NAME",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a drafter and verify its acceptance in vLLM.

    For several processes or machines, start it with torchrun: torchrun --nproc-per-node 8 -m
    leadout train ... Flags after `--` go to every vLLM engine that it starts.
    """
    require("train")

    from leadout.train import command
    from leadout.train.config import TrainConfig
    from leadout.train.export import SETTINGS

    if resume and config is None and (out / SETTINGS).exists():
        config = out / SETTINGS
    settings = settings_of(context, TrainConfig, config)
    if plan:
        planned = command.plan(target, data, settings, context.args)
        if planned is not None:  # only the leading rank reports
            typer.echo(planned.model_dump_json(indent=2) if as_json else planned.text())
        return
    report = command.train(
        target,
        data,
        out,
        settings,
        to=to,
        resume=resume,
        trackers=tracker or (),
        vllm_flags=context.args,
    )
    if report is None:
        return
    typer.echo(report.model_dump_json(indent=2) if as_json else report.text())
    typer.echo(command.what_next(report, target, out), err=True)
