"""Entry point of the console script: registers the commands and reports their errors.

Exit codes, for every command: 0 success or fit, 1 a negative finding, 2 wrong usage or could not
run, 3 undecided, 130 interrupted (see `leadout.errors`).
"""

import os
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from leadout.cli import (
    bench,
    check,
    convert,
    data,
    env,
    inspect,
    learn,
    make,
    relay,
    selftest,
    serve,
    train,
    tune,
)
from leadout.cli.options import PanelCommand, settings_command, stopped_by_signals
from leadout.errors import FAILED, INTERRUPTED, LeadoutError
from leadout.version import __version__


class Commands(TyperGroup):
    """Turns errors that are meant for a user into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with stopped_by_signals():
                return super().invoke(ctx)
        except LeadoutError as problem:
            label = "leadout" if problem.exit_code == INTERRUPTED else "error"
            typer.echo(f"{label}: {problem}", err=True)
            raise typer.Exit(problem.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("leadout: interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except OSError as problem:  # a full disk, a missing permission: the system's own words
            if problem.errno is None or os.environ.get("LEADOUT_TRACEBACK"):
                raise
            place = f"{problem.filename}: " if problem.filename else ""
            typer.echo(f"error: {place}{problem.strerror}.", err=True)
            raise typer.Exit(FAILED) from None
        except Exception as problem:
            if hasattr(problem, "exit_code") or isinstance(problem, typer.Abort):
                raise  # wrong usage, or the end of a command
            # Python's own exit code for a bug, 1, would be a negative finding.
            typer.echo(traceback.format_exc(), err=True)
            raise typer.Exit(FAILED) from None


# Flags that a command does not know are vLLM's: anywhere, or after `--` only.
_ANY_VLLM_FLAG = {"allow_extra_args": True, "ignore_unknown_options": True}
_VLLM_FLAGS_AFTER_DASHES = {"allow_extra_args": True}

app = typer.Typer(
    name="leadout",
    cls=Commands,
    help="DFlash speculative decoding on vLLM: from training a drafter to keeping it fast.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(
    "make",
    cls=settings_command("leadout.make.settings:MakeSettings"),
    context_settings=_VLLM_FLAGS_AFTER_DASHES,
)(make.make)
app.command(
    "serve",
    cls=settings_command("leadout.engine.settings:ServeSettings"),
    context_settings=_ANY_VLLM_FLAG,
)(serve.serve)
app.command(
    "tune",
    cls=settings_command("leadout.tune.settings:TuneSettings"),
    context_settings=_ANY_VLLM_FLAG,
)(tune.tune)
app.command(
    "check",
    cls=settings_command("leadout.check.settings:CheckSettings"),
    context_settings=_VLLM_FLAGS_AFTER_DASHES,
)(check.check)
app.command(
    "bench",
    cls=settings_command("leadout.bench.settings:BenchSettings"),
    context_settings=_VLLM_FLAGS_AFTER_DASHES,
)(bench.bench)
app.command(
    "selftest",
    cls=settings_command("leadout.selftest.settings:SelftestSettings"),
    context_settings=_ANY_VLLM_FLAG,
)(selftest.selftest)
app.command(
    "data",
    cls=settings_command("leadout.data.settings:DataSettings"),
    context_settings=_VLLM_FLAGS_AFTER_DASHES,
)(data.data)
app.command("inspect", cls=PanelCommand)(inspect.inspect)
app.command("convert", cls=PanelCommand)(convert.convert)
app.command(
    "train",
    cls=settings_command("leadout.train.config:TrainConfig"),
    context_settings=_VLLM_FLAGS_AFTER_DASHES,
)(train.train)
app.command(
    "learn",
    cls=settings_command("leadout.learn.config:LearnConfig"),
    context_settings=_VLLM_FLAGS_AFTER_DASHES,
)(learn.learn)
app.command("relay", cls=PanelCommand)(relay.relay)
app.command("env", cls=PanelCommand)(env.env)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"leadout {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """DFlash speculative decoding on vLLM: from training a drafter to keeping it fast."""


def main() -> None:
    app()
