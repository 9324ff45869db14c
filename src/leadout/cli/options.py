"""A model's fields as flags of a command: one place for a setting's name, help and type.

The model is imported when the command itself is looked at, not when all commands are listed:
importing pydantic takes longer than printing the help.
"""

import inspect
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from leadout.environment import Need, known_troubles, usability

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


_SETTINGS = "leadout.settings"


class CommandWithFields(TyperCommand):
    """A command with one more flag for each field of `model`, unset unless given."""

    model: str  # as module:class

    def get_params(self, ctx: Any) -> list[Any]:
        *own, helper = super().get_params(ctx)  # --help comes last
        return [*own, *_flags(self.model), helper]

    def invoke(self, ctx: Any) -> Any:
        names = {flag.name for flag in _flags(self.model)}
        ctx.meta[_SETTINGS] = {name: ctx.params.pop(name) for name in names & ctx.params.keys()}
        return super().invoke(ctx)


def settings_of(context: typer.Context) -> dict[str, Any]:
    """The values of the fields' flags; None where one was not given."""
    found: dict[str, Any] = context.meta[_SETTINGS]
    return {name: None if value in ((), []) else value for name, value in found.items()}


@cache
def _flags(path: str) -> list[Any]:
    """The fields as parameters of a command, made by typer from a signature."""
    module, _, name = path.partition(":")
    model: type[BaseModel] = getattr(import_module(module), name)
    flags = [_flag(name, field) for name, field in model.model_fields.items()]

    def command(**_settings: Any) -> None: ...

    command.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    command.__annotations__ = {flag.name: flag.annotation for flag in flags}
    maker = typer.Typer(add_completion=False)
    maker.command()(command)
    return list(typer.main.get_command(maker).params)


def _flag(name: str, field: "FieldInfo") -> inspect.Parameter:
    default = "chosen by itself" if field.default is None else field.default
    text = f"{field.description} ({default})"
    kind = field.annotation
    flag = f"--{name.replace('_', '-')}"
    option: Any
    if kind is bool:
        option = typer.Option(f"{flag}/--no-{name.replace('_', '-')}", help=text)
    else:
        option = typer.Option(flag, help=text)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[_as_typer_takes_it(kind), option],
    )


def _as_typer_takes_it(kind: Any) -> Any:
    """A tuple of any length is written as repeated flags; everything may be left out."""
    if "tuple" in str(kind):
        return list[int] | None
    return kind | None


# What each command needs beyond the base install; `leadout env` reports from this table.

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
