"""`leadout train`: a drafter for a target, from the target's own answers.

Every field of the training config is a flag; they are added to the command's own below.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from leadout.cli.options import settings_of


def train(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Folder or hub name of the target.")],
    data: Annotated[Path, typer.Option(help="Folder that `leadout data` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the run and the drafter.")],
    config: Annotated[
        Path | None, typer.Option(help="Yaml file of settings; flags come before it.")
    ] = None,
    to: Annotated[
        Literal["zlab", "speculators"], typer.Option("--format", help="Format of the drafter.")
    ] = "zlab",
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run cut short.")] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Tell tokens, memory, disk and time; train nothing.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a drafter and prove its acceptance in vLLM.

    For several processes or machines, start it with torchrun: torchrun --nproc-per-node 8 -m
    leadout train ...
    """
    from leadout.cli import options as needs

    needs.require("train")

    from leadout.train.command import RESOLVED, Command, carry_out
    from leadout.train.config import TrainConfig

    if resume and config is None and (out / RESOLVED).exists():
        config = out / RESOLVED  # a continued run has its settings already
    resolved = settings_of(context, TrainConfig, config)
    report = carry_out(Command(target, data, out, resolved, to, resume, plan, tensorboard))
    if report is not None:  # only the leading rank reports
        typer.echo(report.model_dump_json(indent=2) if as_json else report.text())
