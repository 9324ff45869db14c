"""`leadout learn`: adapt a drafter to its traffic in one cycle, or show earlier decisions."""

from typing import TYPE_CHECKING, Annotated

import typer

from leadout.cli.options import require, settings_of
from leadout.errors import NEGATIVE, UNDECIDED

if TYPE_CHECKING:
    from leadout.learn.config import LearnConfig


def learn(
    context: typer.Context,
    status: Annotated[
        bool, typer.Option("--status", help="Show versions and decisions; trains nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Adapt the serving drafter to captured traffic; publish it if it is significantly better.

    Servers started with --registry swap it in automatically. Exit code 1: the candidate was
    rejected; 3: undecided, more requests are needed. To train in several processes, start it with
    torchrun: torchrun --nproc-per-node 8 -m leadout learn ... Flags after `--` go to every vLLM
    engine that it starts.
    """
    from leadout.learn.config import LearnConfig

    config = settings_of(context, LearnConfig, vllm_flags=tuple(context.args))
    if status:
        _show_status(config, as_json)
        return
    require("learn")
    if config.start is not None:
        _start_registry(config, config.start, as_json)
        return

    from leadout.learn.cycle import learn as run_cycle
    from leadout.learn.report import print_result

    result = run_cycle(config, show_progress=True)
    if result is None:  # only the leading rank reports
        return
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    else:
        print_result(result, config.registry, config.work_folder / "candidate")
    if not result.promoted:
        undecided = result.decision.verdict == "undecided"
        raise typer.Exit(UNDECIDED if undecided else NEGATIVE)


def _start_registry(config: "LearnConfig", drafter: str, as_json: bool) -> None:
    from leadout.learn.cycle import start_registry
    from leadout.learn.prepare import signing_key

    target, key = config.required("target"), signing_key(config.registry_key)
    started = start_registry(target, config.registry, drafter, key)
    if as_json:
        typer.echo(started.model_dump_json(indent=2))
        return
    typer.echo(f"Created {config.registry}; version {started.version} is {drafter}.")
    signed = "" if key is None else " --registry-key PUBLIC_KEY"
    typer.echo(f"Next: leadout serve {target} --registry {config.registry}{signed} --capture DIR")


def _show_status(config: "LearnConfig", as_json: bool) -> None:
    from leadout.learn.report import print_status, read_status

    status = read_status(config.registry)
    if as_json:
        typer.echo(status.model_dump_json(indent=2))
    else:
        print_status(status)
