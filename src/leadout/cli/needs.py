"""What each command needs beyond the base install; `leadout env` reports from this table."""

import typer

from leadout.environment import Need, usability

ENGINE = Need(
    module="vllm", remedy="pip install 'leadout[vllm]' (or 'leadout[cpu]' without an accelerator)"
)

NEEDS: dict[str, tuple[Need, ...]] = {
    "check": (ENGINE,),  # not with --static
    "convert": (),
    "data": (ENGINE,),
    "env": (),
    "inspect": (),
    "serve": (ENGINE,),
    "train": (ENGINE,),
}


def require(command: str, exit_code: int = 2) -> None:
    """End with the remedy where a command's needs are not met."""
    state = usability(NEEDS[command])
    if not state.usable:
        typer.echo(f"leadout {command} cannot run here: {state.remedy}", err=True)
        raise typer.Exit(exit_code)
