"""`leadout --help` answers at once, and every command says what it needs."""

import resource
import subprocess
import sys

from leadout.cli.app import app
from leadout.cli.options import NEEDS


def test_help_answers_in_under_0_8_seconds() -> None:
    # Processor time of the command in a fresh process: other work on the machine does not count.
    command = [sys.executable, "-c", "from leadout.cli.app import main; main()", "--help"]
    durations = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        durations.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert "env" in shown.stdout
    assert min(durations) < 0.8, durations


def test_no_command_imports_torch_or_transformers_before_it_runs() -> None:
    code = (
        "import sys, leadout.cli.app\n"
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_every_command_declares_its_needs() -> None:
    assert {command.name for command in app.registered_commands} == set(NEEDS)
