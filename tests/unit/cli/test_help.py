"""`leadout --help` answers at once, and every command says what it needs."""

import resource
import subprocess
import sys

from leadout.cli.app import app
from leadout.cli.options import NEEDS


def processor_seconds(code: str, *words: str) -> float:
    """Of Python code in a process of its own: other work on the machine does not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, *words]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--help" not in words or "env" in shown.stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_answers_at_once() -> None:
    # Measured: twice as long as the libraries of the command line alone, which is 0.2 s.
    libraries = min(processor_seconds("import typer, pydantic, rich.console") for _ in range(3))
    main = "from leadout.cli.app import main; main()"
    assert min(processor_seconds(main, "--help") for _ in range(3)) < 4 * libraries


def test_no_command_imports_torch_or_transformers_before_it_runs() -> None:
    code = (
        "import sys, leadout.cli.app\n"
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_every_command_declares_its_needs() -> None:
    assert {command.name for command in app.registered_commands} == {
        name.partition(" ")[0] for name in NEEDS
    }
