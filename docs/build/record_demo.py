"""Record the README's demo from real runs, and render it.

    python docs/build/record_demo.py TARGET [--out results/demo]

TARGET is the folder that examples/make_smollm2.py makes. In a temporary folder, stock vLLM serves
the shipped drafter with a seeded fault, `leadout check --fix` names the fault and writes the
repaired drafter, and the same vLLM command serves that one; a client measures both servers. Written
are `demo.cast`, the output of the commands as it came, with its times (asciicast v2); `demo.json`,
the measured numbers and how they were made; and `demo.svg`, the recording as an animation, in which
pauses are cut to PAUSE_SECONDS. Only the typing is made up. Takes about five minutes on two idle
cores, and needs port 8000.

Stock vLLM is the server behind `vllm serve`, started as a module, because that command does not
start with the CPU build of vLLM 0.32. LEADOUT_PLUGIN=0 keeps Leadout out of it.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from result_tables import ROOT
from terminal_svg import read_cast, render

from leadout.engine.server import Server
from leadout.models import fingerprint
from leadout.provenance import Provenance, RunStart

OUT = ROOT / "results" / "demo"
SHIPPED = ROOT / "drafters" / "smollm2-135m-instruct-dflash"
TITLE = (
    "SmolLM2-135M-Instruct on two CPU cores, vLLM 0.32. Real runs, pauses cut to {pause:g} seconds."
)
COLUMNS, ROWS = 92, 27
PAUSE_SECONDS = 0.7
WORD_SECONDS = 0.09  # between two typed words
PORT = 8000
WRONG, MENDED = "drafter", "mended"
MASK_TOKEN_ID = 0  # in place of the one that the drafter was trained with

# As in the experiments: a server with few cores must not spend them on waiting.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
SERVE = """\
LEADOUT_PLUGIN=0 python -m vllm.entrypoints.openai.api_server --model smollm2 \\
    --dtype float32 --max-model-len 2048 --enforce-eager --speculative-config \\
    '{{"method": "dflash", "model": "{drafter}", "num_speculative_tokens": 5}}'"""
WAIT = f"until curl -sf localhost:{PORT}/health; do sleep 1; done"
MEASURE = "python examples/tokens_per_second.py | tee {name}.txt"
ERRORS = "grep -c ERROR server.log"
CHECK = f"leadout check smollm2 {WRONG} --fix {MENDED} --dtype float32 > check.txt"
VERDICT = "head -n 4 check.txt"
NEXT = "tail -n 1 check.txt"
COMPARE = "grep second before.txt after.txt"
_SPEED = re.compile(r"([\d.]+) \(([\d.]+) to ([\d.]+)\) tokens per second, (\d+) answers")
_LENGTH = re.compile(r"([\d.]+) tokens per step")


def main() -> None:
    started = RunStart.now()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "smollm2").symlink_to(arguments.target.resolve())
        (folder / "examples").symlink_to(ROOT / "examples")
        seed_fault(folder / WRONG)
        terminal = Terminal(folder)
        measured = play(terminal, folder)
        models = {
            "target": fingerprint(arguments.target),
            "drafter": fingerprint(SHIPPED),
            "wrong drafter": fingerprint(folder / WRONG),
            "repaired drafter": fingerprint(folder / MENDED),
        }
    made = Provenance.of_this_run(models, started)
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = {
        "provenance": made.model_dump(),
        "environment": ENVIRONMENT,
        "fault": f"mask_token_id {MASK_TOKEN_ID}",
        **measured,
    }
    (arguments.out / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    (arguments.out / "demo.cast").write_text(terminal.cast())
    (arguments.out / "demo.svg").write_text(render(read_cast(terminal.cast())))


def seed_fault(folder: Path) -> None:
    """The shipped drafter, as a conversion leaves it that lost the mask token's id."""
    folder.mkdir()
    shutil.copyfile(SHIPPED / "model.safetensors", folder / "model.safetensors")
    config = json.loads((SHIPPED / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = MASK_TOKEN_ID
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def play(terminal: Terminal, folder: Path) -> dict[str, Any]:
    """The demo; returns what its clients measured."""
    terminal.type("# Stock vLLM serves a drafter whose config has a wrong mask token. No error:")
    with serving(terminal, folder, WRONG):
        terminal.run(ERRORS, codes=(0, 1))
        before = terminal.run(MEASURE.format(name="before"))
        terminal.type("kill %1")
    terminal.type("# Does this drafter fit this model? If not, why?")
    terminal.run(CHECK, codes=(1, 3))
    terminal.run(VERDICT)
    terminal.run(NEXT)
    terminal.type("# The same server with the repaired drafter:")
    with serving(terminal, folder, MENDED):
        after = terminal.run(MEASURE.format(name="after"))
        terminal.type("kill %1")
    terminal.run(COMPARE)
    return {"before": numbers_in(before), "after": numbers_in(after)}


@contextmanager
def serving(terminal: Terminal, folder: Path, drafter: str) -> Iterator[None]:
    """A server by the command that is shown, with a guard in place of the shell's `&`."""
    command = SERVE.format(drafter=drafter)
    terminal.type(f"{command} \\\n    > server.log 2>&1 &")
    script = f'cd {folder}; {command.replace("LEADOUT_PLUGIN=0 ", "LEADOUT_PLUGIN=0 exec ")} "$@"'
    server = Server(["bash", "-c", script, "serve"], log=folder / "server.log", port=PORT)
    try:
        server.start()
        terminal.type(WAIT)
        server.wait_until_healthy()
        terminal.run(WAIT, typed=False)
        yield
    finally:
        server.stop()


def numbers_in(output: str) -> dict[str, Any]:
    """Of a client's output: speed with its interval, answers, acceptance length."""
    speed, length = _SPEED.search(output), _LENGTH.search(output)
    if speed is None or length is None:
        raise ValueError(f"the client's output has no measured numbers: {output!r}")
    value, low, high = map(float, speed.groups()[:3])
    return {
        "tokens_per_second": {"value": value, "low": low, "high": high},
        "answers": int(speed[4]),
        "acceptance_length": float(length[1]),
    }


class Terminal:
    """Types commands and runs them; keeps what appears, and when."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began = time.monotonic()
        self._events: list[tuple[float, str]] = []

    def cast(self) -> str:
        """The recording in asciicast v2."""
        header = {
            "version": 2,
            "width": COLUMNS,
            "height": ROWS,
            "idle_time_limit": PAUSE_SECONDS,
            "title": TITLE.format(pause=PAUSE_SECONDS),
        }
        lines = [header, *([at, "o", text] for at, text in self._events)]
        return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)

    def type(self, command: str) -> None:
        """Show a command, word by word."""
        print(f"$ {command}", flush=True)
        self._show("\x1b[32m$\x1b[0m ")
        style = "\x1b[2m" if command.startswith("#") else "\x1b[1m"
        for line in command.splitlines():
            for word in re.findall(r"\s*\S+", line):
                time.sleep(WORD_SECONDS)
                self._show(f"{style}{word}\x1b[0m")
            self._show("\r\n")

    def run(self, command: str, *, codes: tuple[int, ...] = (0,), typed: bool = True) -> str:
        """Run a command and show its output as it comes.

        Its standard output is a terminal, so that it has colours; its standard error is not, so
        that progress comes as lines.
        """
        if typed:
            self.type(command)
        primary, secondary = pty.openpty()
        termios.tcsetwinsize(secondary, (ROWS, COLUMNS))
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self._folder,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)},
            stdin=subprocess.DEVNULL,
            stdout=secondary,
            stderr=subprocess.PIPE,
        )
        os.close(secondary)
        assert process.stderr is not None
        output = "".join(self._lines_of({primary, process.stderr.fileno()}))
        os.close(primary)
        if process.wait() not in codes:
            sys.exit(f"{command!r} ended with {process.returncode}, expected {codes}:\n{output}")
        return output

    def _lines_of(self, sources: set[int]) -> Iterator[str]:
        """Whole lines, so that those of the two sources are not mixed."""
        rests = dict.fromkeys(sources, b"")
        with selectors.DefaultSelector() as selector:
            for source in sources:
                selector.register(source, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    more = _read(key.fd)
                    if not more:
                        selector.unregister(key.fd)
                    whole, newline, rest = (rests[key.fd] + more).rpartition(b"\n")
                    rests[key.fd] = rest
                    if newline:
                        text = (whole + newline).decode().replace("\r\n", "\n")
                        print(text, end="", flush=True)
                        self._show(text.replace("\n", "\r\n"))
                        yield text

    def _show(self, text: str) -> None:
        self._events.append((round(time.monotonic() - self._began, 3), text))


def _read(source: int) -> bytes:
    try:
        return os.read(source, 65536)
    except OSError:  # a terminal whose last process has ended
        return b""


if __name__ == "__main__":
    main()
