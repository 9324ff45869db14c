"""What each command needs beyond the base install; `leadout env` reports from this table."""

import typer

from leadout.environment import Need, known_troubles, usability

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
    """End with the remedy where a command's needs are not met; warn of what may not work."""
    state = usability(NEEDS[command])
    if not state.usable:
        typer.echo(f"leadout {command} cannot run here: {state.remedy}", err=True)
        raise typer.Exit(exit_code)
    if ENGINE in NEEDS[command]:  # before the engine's own words on it, which name no remedy
        for trouble in known_troubles():
            typer.echo(f"leadout: warning: {trouble}", err=True)
