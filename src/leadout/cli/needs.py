"""What each command needs beyond the base install; `leadout env` reports from this table."""

import typer

from leadout.environment import Need, usability

ENGINE = Need(
    module="vllm", remedy="pip install 'leadout[vllm]' (or 'leadout[cpu]' without an accelerator)"
)
PANDAS = Need(module="pandas", remedy="pip install 'leadout[bench]'")  # of the load generator

NEEDS: dict[str, tuple[Need, ...]] = {
    "bench": (ENGINE, PANDAS),
    "check": (ENGINE,),  # not with --static
    "convert": (),
    "data": (ENGINE,),
    "env": (),
    "inspect": (),
    "learn": (ENGINE,),  # not with --status
    "serve": (ENGINE,),
    "train": (ENGINE,),
    "tune": (ENGINE,),
}


def require(command: str, exit_code: int = 2) -> None:
    """End with the remedy where a command's needs are not met."""
    state = usability(NEEDS[command])
    if not state.usable:
        typer.echo(f"leadout {command} cannot run here: {state.remedy}", err=True)
        raise typer.Exit(exit_code)
