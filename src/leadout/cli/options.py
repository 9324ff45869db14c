"""Commands whose flags come from a settings model, what each needs to run, and how it is stopped.

The model is imported when the command itself is looked at, not when all commands are listed:
importing pydantic takes longer than printing the help.
"""

import inspect
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand

from leadout.environment import Need, known_problems, usability
from leadout.errors import LeadoutError

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic.fields import FieldInfo

    from leadout.settings import Settings

    Model = TypeVar("Model", bound=Settings)

_META = "leadout.settings"
_METAVARS = {"int": "N", "float": "X", "str": "TEXT", "Path": "PATH"}


class PanelCommand(TyperCommand):
    """A command whose help groups options by panel and fits into 80 columns."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # Typer's own help draws boxes, which cut long flag names at 80 columns.
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        parameters: list[Any] = self.get_params(ctx)
        for each in parameters:
            if each.param_type_name == "argument":
                if not each.hidden:
                    panels["Arguments"].append((each.metavar or each.name.upper(), each.help or ""))
            elif (record := each.get_help_record(ctx)) is not None:
                panels.setdefault(each.rich_help_panel or "Options", []).append(record)
        # Sections that a command names come in their order, the unnamed rest at the end.
        panels["Options"] = panels.pop("Options")
        for title, records in panels.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records, col_max=27)


class SettingsCommand(PanelCommand):
    """A command with one more flag or argument for each field of the settings model `model`.

    The function behind it takes `context: typer.Context` and the flags that are not settings
    (`--json`, `--plan`); `settings_of` returns the model.
    """

    model: str  # as module:class

    def get_params(self, ctx: Any) -> list[Any]:
        *own, helper = super().get_params(ctx)  # --help comes last
        added = _parameters(self.model)
        arguments = [each for each in added if each.param_type_name == "argument"]
        flags = [each for each in added if each.param_type_name != "argument"]
        return [*arguments, *flags, *own, helper]

    def invoke(self, ctx: Any) -> Any:
        names = {each.name for each in _parameters(self.model)}
        ctx.meta[_META] = {name: ctx.params.pop(name) for name in names & ctx.params.keys()}
        return super().invoke(ctx)


def settings_command(path: str) -> type[SettingsCommand]:
    """The command class for a settings model, given as module:class."""
    return type("Command", (SettingsCommand,), {"model": path})


def settings_of(
    context: typer.Context,
    model: "type[Model]",
    file: "Path | None" = None,
    **more: Any,
) -> "Model":
    """The settings model from the flags of this call, over an optional YAML file."""
    found = {
        name: None if value in ((), []) else value for name, value in context.meta[_META].items()
    }
    return model.resolve(found | more, file)


@cache
def _parameters(path: str) -> list[Any]:
    """The fields as parameters of a command, made by typer from a signature."""
    module, _, name = path.partition(":")
    model: type[Settings] = getattr(import_module(module), name)
    parameters = [
        made
        for name, field in model.model_fields.items()
        if (made := _parameter(model, name, field)) is not None
    ]

    def command(**_settings: Any) -> None: ...

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    maker = typer.Typer(add_completion=False)
    maker.command()(command)
    return list(typer.main.get_command(maker).params)


def _parameter(model: "type[Settings]", name: str, field: "FieldInfo") -> inspect.Parameter | None:
    extra: Any = field.json_schema_extra or {}
    panel = extra.get("panel")
    if panel == "hidden":  # set by Python callers or by the command itself only
        return None
    kind, inner = _typer_kind(field.annotation)
    text = field.description or ""
    is_shown = field.default is not None and field.default is not False and field.default != ()
    if is_shown and not field.is_required():
        text += f" [default: {_listed(field.default)}]"
    metavar = extra.get("metavar") or (
        None if get_origin(inner) is Literal else _METAVARS.get(getattr(inner, "__name__", ""))
    )
    option: Any
    if panel == "argument":
        option = typer.Argument(help=text, metavar=name.upper(), show_default=False)
    else:
        flag = model.flag_of(name)
        if inner is bool:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        option = typer.Option(
            flag, help=text, metavar=metavar, rich_help_panel=panel, show_default=False
        )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        # Required settings are required by the model: its message names the flag and the help.
        default=None,
        annotation=Annotated[kind, option],
    )


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _typer_kind(annotation: Any) -> tuple[Any, Any]:
    """The type that typer takes, and the type of one value: tuples are repeated flags."""
    options = [each for each in get_args(annotation) if each is not type(None)]
    is_optional = get_origin(annotation) is not Literal and type(None) in get_args(annotation)
    kind = options[0] if is_optional else annotation
    if get_origin(kind) is tuple:
        return list[get_args(kind)[0]] | None, get_args(kind)[0]  # type: ignore[misc]
    return kind | None, kind


# What each command needs beyond the base install; `leadout env` reports from this table.

ENGINE = Need(
    module="vllm", remedy="pip install 'leadout[vllm]' (or 'leadout[cpu]' without an accelerator)"
)
OPENAI = Need(module="openai", remedy="pip install 'leadout[data]'")
AIOHTTP = Need(module="aiohttp", remedy="pip install 'leadout[bench]'")  # of the load

NEEDS: dict[str, tuple[Need, ...]] = {
    "bench": (ENGINE, AIOHTTP),
    "check": (ENGINE,),  # not with --static
    "convert": (),
    "data": (ENGINE,),
    "data --endpoint": (OPENAI,),
    "env": (),
    "inspect": (),
    "learn": (ENGINE,),  # not with --status
    "learn --states": (),
    "make": (ENGINE, AIOHTTP),
    "relay": (),
    "selftest": (ENGINE, AIOHTTP),
    "serve": (ENGINE,),
    "train": (ENGINE,),
    "tune": (ENGINE, AIOHTTP),
}


class MissingDependencyError(LeadoutError):
    """Something that a command needs is not installed."""


def require(command: str) -> None:
    """Stop with the remedy where a command's needs are not met; warn of known problems."""
    state = usability(NEEDS[command])
    if not state.usable:
        raise MissingDependencyError(f"leadout {command} cannot run here: {state.remedy}")
    if ENGINE in NEEDS[command]:  # before the engine's own message, which names no remedy
        for problem in known_problems():
            typer.echo(f"leadout: warning: {problem}", err=True)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM ends the block with KeyboardInterrupt, as Ctrl-C does.

    Supervisors and job schedulers send it, and what a command saves after Ctrl-C is saved then too.
    SIGINT does the same where it is ignored, as in programs that a script starts in the background.
    """

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():  # handlers are for no other
        numbers.append(signal.SIGTERM)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            numbers.append(signal.SIGINT)
    before = {each: signal.signal(each, stop) for each in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
