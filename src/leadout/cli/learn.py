"""`leadout learn`: adapt a drafter to its traffic, in one cycle or continuously; show decisions."""

from typing import TYPE_CHECKING, Annotated

import typer

from leadout.cli.options import require, settings_of
from leadout.errors import NEGATIVE, UNDECIDED, StoppedError

if TYPE_CHECKING:
    from leadout.learn.config import LearnConfig
    from leadout.learn.report import LearnResult


def learn(
    context: typer.Context,
    status: Annotated[
        bool, typer.Option("--status", help="Show versions and decisions; trains nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Adapt the serving drafter to its traffic; publish it if it is significantly better.

    Servers started with --registry swap it in automatically. With --traffic it runs one cycle on
    captured requests; with --states one after the other, on hidden states as they are served, and
    nothing that users wrote gets into a file. Exit code 1: the candidate was rejected; 3:
    undecided, more requests are needed. To train on captured requests in several processes, start
    it with torchrun: torchrun --nproc-per-node 8 -m leadout learn ... Flags after `--` go to every
    vLLM engine that it starts.
    """
    from leadout.learn.config import LearnConfig

    config = settings_of(context, LearnConfig, vllm_flags=tuple(context.args))
    if status:
        _show_status(config, as_json)
        return
    if config.start is not None:
        require("learn")
        _start_registry(config, config.start, as_json)
        return
    if config.states:
        require("learn --states")
        result = _learn_from_states(config, as_json)
    else:
        require("learn")
        from leadout.learn.cycle import learn as run_cycle

        result = run_cycle(config, show_progress=True)
        if result is not None:  # only the leading rank reports
            _show_result(config, result, as_json)
    if result is not None and not result.promoted:
        undecided = result.decision.verdict == "undecided"
        raise typer.Exit(UNDECIDED if undecided else NEGATIVE)


def _show_result(config: "LearnConfig", result: "LearnResult", as_json: bool) -> None:
    from leadout.learn.report import print_result

    if as_json:
        # One line for each of several cycles.
        typer.echo(result.model_dump_json(indent=None if config.states else 2))
    else:
        print_result(result, config.registry, config.work_folder / "candidate")


def _learn_from_states(config: "LearnConfig", as_json: bool) -> "LearnResult | None":
    """The last result; None if it ran until it was stopped, which is no failure."""
    from leadout.learn.continuous import learn_from_states, protect_process

    protect_process(nice=config.nice)
    try:
        return learn_from_states(
            config, lambda result: _show_result(config, result, as_json), show_progress=True
        )
    except KeyboardInterrupt:
        if config.cycles is not None:
            raise StoppedError(
                f"Stopped before {config.cycles} cycles were done. Run the same command again to "
                "learn from what is served from then on."
            ) from None
        typer.echo("leadout: stopped; the served text was in memory only.", err=True)
        return None


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
