"""The quickstart's commands run as the page shows them, on the real model, with less to measure.

They run in an environment that has Leadout from the wheel, with the extras of the page and without
a way to the tree.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from leadout.bench.results import BenchResult
from leadout.engine.server import free_port
from leadout.errors import SUCCESS, UNDECIDED
from support.distribution import Installed, build_distributions, install_wheel
from support.models import ROOT

PAGE = ROOT / "docs" / "quickstart.md"
MOST_SECONDS = 6600  # with --nightly the engine starts seven times, also on a busy machine
pytestmark = pytest.mark.timeout(MOST_SECONDS + 900)
# Not run here: `installed` stands for the first three, and the model is made once for all tests, by
# the same script.
DONE_BEFORE = ("python3 -m venv", "pip install", "pip uninstall", "python examples/make_smollm2.py")
# What takes minutes is given less to do: words of a command, and what stands in their place.
SHORTENED = {
    "leadout check": ("--report", "--prompts few.jsonl --long-context 0 --report"),
    # What it wrote for the page is committed, and used by the commands after it.
    "leadout tune": ("--max-batch 4", "--max-batch 4 --plan"),
    # Four servers of the real model; test_bench measures those of a tiny one.
    "leadout bench": ("--out bench", "--out bench --plan"),
}
SHORTENED_NIGHTLY = {
    **SHORTENED,
    "leadout bench": (
        "--concurrency 1 --concurrency 4 --rounds 10 --seconds 3 --output-tokens 64",
        "--concurrency 1 --rounds 1 --seconds 1 --output-tokens 8",
    ),
}
# Four prompts are too few texts, and one round has no confidence interval.
EXIT_CODES = {"leadout check": UNDECIDED}
EXIT_CODES_NIGHTLY = {**EXIT_CODES, "leadout bench": UNDECIDED}
# Of what the page shows, the words that must also come out here.
STABLE = {
    "leadout env": ["model runner", "accelerators", "command", "yes"],
    "leadout inspect": [],  # compared as a whole
    "leadout check": ["Acceptance length: tokens per step of the target", "Parity:"],
    "leadout tune": [],
    "leadout bench": [],
    "leadout serve --plan": ["--speculative-config"],
    "leadout serve": [],
    "until curl": [],
    "curl -s localhost:PORT/v1": ['"content"', "def ", '"completion_tokens"'],
    "curl -s localhost:PORT/metrics": ["leadout:acceptance_length{", 'model_name="smollm2"'],
    "kill": [],
}


@dataclass(frozen=True)
class Step:
    """A command of the page and what stands under it."""

    command: str
    shown: str

    @property
    def name(self) -> str:
        if "--plan" in self.command:  # of serve: the page shows no other
            return "leadout serve --plan"
        plain = self.command.replace("8000", "PORT")
        return next(name for name in STABLE if plain.startswith(name))


def steps_of(page: str) -> list[Step]:
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            # A command goes on while a line ends with a backslash or a quote is open.
            end = 1
            while lines[end - 1].endswith("\\") or "\n".join(lines[:end]).count("'") % 2:
                end += 1
            found.append(Step("\n".join(lines[:end]), "\n".join(lines[end:])))
    return found


def as_run_here(step: Step, port: int, shortened: Mapping[str, tuple[str, str]]) -> str:
    command = step.command
    for name, (words, instead) in shortened.items():
        if command.startswith(name) and "--plan" not in command:
            plain = re.sub(r"\\\n\s*", "", command)
            assert words in plain, f"the page says something else than the table: {plain}"
            command = plain.replace(words, instead)
    return command.replace("8000", str(port))


def extras_of(page: str) -> list[str]:
    """The extras with which a reader installs Leadout."""
    (line,) = re.findall(r"^\$ pip install '(?:\.|leadout)\[([a-z0-9,]+)\]'", page, re.MULTILINE)
    return str(line).split(",")


@dataclass(frozen=True)
class Run:
    folder: Path
    printed: dict[str, str]
    exit_codes: dict[str, int]


STEPS = [s for s in steps_of(PAGE.read_text()) if not s.command.startswith(DONE_BEFORE)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    wheel = build_distributions(folder / "dist").wheel
    return install_wheel(wheel, folder / "venv", extras_of(PAGE.read_text()))


@pytest.fixture(scope="module")
def run(
    installed: Installed, smollm2: Path, nightly: bool, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """All commands in one shell, one after the other, as a reader types them."""
    folder = tmp_path_factory.mktemp("quickstart")
    (folder / "drafters").symlink_to(ROOT / "drafters")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "smollm2").symlink_to(smollm2)
    (folder / "tuned.json").symlink_to(ROOT / "results" / "quickstart" / "tuned.json")
    prompts = (ROOT / "examples" / "prompts.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(prompts[:4]))
    port = free_port()
    where = "import leadout; print(leadout.__file__)"
    # Jobs, as in a terminal: the last command ends one.
    script = ["set -m", f"python -c '{where}' > imported"]
    for number, step in enumerate(STEPS):
        printed = f"> printed-{number} 2> errors-{number}"
        command = as_run_here(step, port, SHORTENED_NIGHTLY if nightly else SHORTENED)
        script.append(f"echo {step.name}: $SECONDS >> seconds")
        # A job in the background must belong to the shell itself, not to a group of commands.
        script.append(command if command.endswith("&") else f"{{ {command}\n}} {printed}")
        script.append(f"echo $? > code-{number}")
    (folder / "script.sh").write_text("\n".join(script) + "\n")
    guards_end, lifeline = os.pipe()
    guard = [installed.python, "-m", "leadout.engine.child_process", str(guards_end), "--"]
    environment = {**installed.environment, "VLLM_CPU_KVCACHE_SPACE": "1"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # readers have not set it
    shell = subprocess.Popen(
        [*guard, "bash", "script.sh"], cwd=folder, env=environment, pass_fds=(guards_end,)
    )
    os.close(guards_end)
    try:
        shell.wait(timeout=MOST_SECONDS)
    finally:  # the guard then ends whatever is left
        os.close(lifeline)
        shell.wait(timeout=600)
    read = {
        step.name: (
            (folder / f"printed-{number}").read_text()
            if (folder / f"printed-{number}").exists()
            else ""
        )
        for number, step in enumerate(STEPS)
    }
    codes = {
        step.name: int((folder / f"code-{number}").read_text()) for number, step in enumerate(STEPS)
    }
    return Run(folder, read, codes)


def errors(run: Run, step: Step) -> str:
    path = run.folder / f"errors-{STEPS.index(step)}"
    log = run.folder / "server.log"
    return (path if path.exists() else log).read_text()[-3000:]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_command_does_what_the_page_shows(run: Run, step: Step, nightly: bool) -> None:
    codes = EXIT_CODES_NIGHTLY if nightly else EXIT_CODES
    assert run.exit_codes[step.name] == codes.get(step.name, SUCCESS), errors(run, step)
    for words in STABLE[step.name]:
        assert words in step.shown, "the page does not show what is compared"
        assert words in run.printed[step.name], run.printed[step.name] + errors(run, step)


def test_the_commands_are_those_of_the_wheel(run: Run, installed: Installed) -> None:
    imported = Path((run.folder / "imported").read_text().strip())
    assert imported.is_relative_to(installed.folder)


def test_an_output_without_measured_numbers_is_shown_to_the_letter(run: Run) -> None:
    (step,) = [step for step in STEPS if step.name == "leadout inspect"]
    printed = [line.rstrip() for line in run.printed[step.name].splitlines()]
    assert "\n".join(printed).rstrip() == step.shown.rstrip()


def test_the_report_that_the_page_names_is_there(run: Run) -> None:
    assert "<html" in (run.folder / "check.html").read_text()


@pytest.mark.nightly
def test_the_results_that_the_page_names_are_there(run: Run) -> None:
    bench = BenchResult.model_validate_json((run.folder / "bench" / "results.json").read_text())
    assert bench.arms == ["bare", "bare-again", "fixed", "tuned"]


def test_the_page_is_read_as_a_reader_reads_it() -> None:
    page = "```console\n$ one \\\n    more\nshown\n$ two '{\n  }' | three\n```\n"
    assert extras_of("```console\n$ pip install '.[cpu,bench]'\n```") == ["cpu", "bench"]
    assert steps_of(page) == [Step("one \\\n    more", "shown"), Step("two '{\n  }' | three", "")]
