"""Entry point of the console script: registers the commands, nothing else."""

import typer

from leadout.cli import bench, check, convert, data, env, inspect, learn, serve, train, tune
from leadout.version import __version__

app = typer.Typer(
    name="leadout",
    help="DFlash speculative decoding on vLLM: from training a drafter to keeping it fast.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    serve.serve
)
app.command("tune")(tune.tune)
app.command("check", cls=check.VerdictCommand)(check.check)
app.command("bench", context_settings={"allow_extra_args": True})(bench.bench)
app.command("data")(data.data)
app.command("inspect")(inspect.inspect)
app.command("convert")(convert.convert)
app.command("train", cls=train.TrainCommand)(train.train)
app.command("learn", cls=learn.LearnCommand)(learn.learn)
app.command("env")(env.env)


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
