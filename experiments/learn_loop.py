"""What the experiments on learning share: stages, servers, kinds of traffic, served acceptance."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.progress import track

from common import SHIPPED
from leadout.data.chat import Chat
from leadout.data.prompts import read_prompts
from leadout.engine.server import Server
from leadout.registry import Registry
from leadout.stats import Interval, bootstrap

CONCURRENCY = 16
FLAGS = (
    *("--max-num-seqs", str(CONCURRENCY), "--max-model-len", "2048", "--enforce-eager"),
    *("--dtype", "float32"),  # the processors without bfloat16 instructions are faster with it
    *("--compilation-config", '{"custom_ops": ["all"]}', "--served-model-name", "smollm2"),
)
BASE = ("gsm8k", "humaneval", "mt_bench")
BATCH = 10  # prompts that are measured together; batches are the unit of the intervals
TRAINING_SETS = ("gsm8k_train", "mbpp_train", "code_train", "chat_train")
COUNTERS = (
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_accepted_tokens_total",
)
KEY = secrets.token_hex(16)
_TOOL = re.compile(r"\w+\(.*\)")  # the last line of a tool's description
_MEASURED_OF = 10  # of a training set, every tenth prompt is measured and never sent as traffic
MEMORY_SECONDS = 0.25

TICKET = (
    "Write a support ticket in XML with the elements <ticket>, <title>, <description>, <priority> "
    "and <status> for this request: "
)
JSON = (
    'Answer with a JSON object that has the keys "task", "language", "steps" (a list) and '
    '"difficulty", and with nothing else. The request is: '
)
EMAIL = (
    "Write an e-mail with the lines From, To, Subject and Date, then a greeting, two paragraphs "
    "and a signature, about this: "
)
TABLE = (
    "Write a Markdown table with the columns Step, Quantity, Value and Unit for this problem, and "
    "below it the line **Answer**: "
)


def ticket(prompt: str) -> str:
    """The request below the descriptions of tools, as a ticket."""
    rows = prompt.split("\n")
    tools = [place for place, row in enumerate(rows) if _TOOL.fullmatch(row)]
    return TICKET + " ".join(rows[tools[-1] + 1 :] if tools else rows)


@dataclass(frozen=True)
class Kind:
    """Traffic of a service that asks for one form of text, which no base drafter has seen."""

    sent: str  # prompt set
    measured: str | None  # prompt set; None: every tenth prompt of `sent`, which is then not sent
    ask: Callable[[str], str]
    beginning: str = ""  # of the answer, given to a target that would not follow the instruction


KINDS = {
    "tickets": Kind("shift_train", "shift", ticket),
    "json": Kind("code_train", None, lambda prompt: JSON + prompt, '{\n  "task": "'),
    "emails": Kind("chat_train", None, lambda prompt: EMAIL + prompt, "From:"),
    "tables": Kind("gsm8k_train", None, lambda prompt: TABLE + prompt, "| Step | Quantity |"),
}


class Prompts:
    """The prompt sets of a folder as token ids of the target's chat template."""

    def __init__(self, folder: Path, target: Path) -> None:
        from transformers import AutoTokenizer

        self._folder = folder
        self._chat = Chat(target)
        self._tokenizer = AutoTokenizer.from_pretrained(target)

    def ids(self, text: str, beginning: str = "") -> list[int]:
        more: list[int] = self._tokenizer.encode(beginning, add_special_tokens=False)
        return self._chat.prompt([text]) + more

    def texts(self, name: str) -> list[str]:
        return [prompt.text for prompt in read_prompts([str(self._folder / f"{name}.jsonl")])]

    def plain(self, name: str, count: int) -> list[list[int]]:
        """Evenly spaced prompts of a set, as some sets are ordered by kind."""
        return [self.ids(text) for text in _spaced(self.texts(name), count)]

    def sent(self, name: str, count: int) -> list[list[int]]:
        """The first distinct requests of a kind, none of which is measured."""
        kind = KINDS[name]
        unseen = {kind.ask(text) for text in self._measured_texts(kind)} | {kind.ask("")}
        asked = dict.fromkeys(kind.ask(text) for text in self.texts(kind.sent))
        texts = [text for text in asked if text not in unseen]
        return [self.ids(text, kind.beginning) for text in texts[:count]]

    def measured(self, name: str, count: int) -> list[list[int]]:
        kind = KINDS[name]
        chosen = _spaced(self._measured_texts(kind), count)
        return [self.ids(kind.ask(text), kind.beginning) for text in chosen]

    def _measured_texts(self, kind: Kind) -> list[str]:
        if kind.measured is not None:
            return self.texts(kind.measured)
        return self.texts(kind.sent)[::_MEASURED_OF]


def _spaced(texts: Sequence[str], count: int) -> list[str]:
    return [texts[len(texts) * i // count] for i in range(min(count, len(texts)))]


class Stages:
    """The folder of a run. A stage runs only once, so that a second call continues the run."""

    def __init__(self, work: Path) -> None:
        self.work = work
        work.mkdir(parents=True, exist_ok=True)

    def is_done(self, name: str) -> bool:
        return (self.work / f"{name}.json").exists()

    def __call__(self, name: str, run: Callable[[], Any]) -> Any:
        """The result of a stage."""
        path = self.work / f"{name}.json"
        if not path.exists():
            print(f"{time.strftime('%H:%M')} {name}", flush=True)
            found = run()
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(found, indent=2) + "\n")
            partial.rename(path)
        return json.loads(path.read_text())


class LearnRun:
    """The arguments of a run, its folder, and its stages."""

    def __init__(self, arguments: Any, more: Sequence[str]) -> None:
        self.arguments, self.more = arguments, more  # `more` flags go to `leadout learn`
        self.target: Path = arguments.target
        self.work: Path = arguments.work
        self.data: Path = arguments.data or self.work / "data"
        self.stage = Stages(self.work)
        self.prompts = Prompts(arguments.prompts, self.target)

    def make_data(self) -> None:
        """The data to replay, unless it is given."""
        settings = self.arguments

        def make() -> dict[str, int]:
            make_data(self.target, settings.prompts, self.data, settings.answers)
            return {"answers": settings.answers}

        if settings.data is None:
            self.stage("data", make)


def start_registry(target: Path, registry: Path) -> None:
    """A registry with the shipped drafter as version 1, unless there is one."""
    if not (registry / "serving.json").exists():
        leadout("learn", target, "--registry", registry, "--start", SHIPPED)


def make_data(target: Path, prompts: Path, out: Path, answers: int) -> None:
    """Text to replay: answers of the target to prompts of the training sets."""
    sources = [w for name in TRAINING_SETS for w in ("--prompts", prompts / f"{name}.jsonl")]
    how = ["--limit", answers // len(TRAINING_SETS), "--greedy-share", 0.75]
    how += ["--max-new-tokens", 128, "--max-length", 1024, "--concurrency", CONCURRENCY]
    how += ["--dtype", "float32"]  # as `FLAGS` of the servers
    leadout("data", target, *sources, *how, "--resume", "--out", out)


def leadout(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "leadout", *map(str, words)], check=True)


@contextmanager
def served(target: Path, log: Path, *words: object) -> Iterator[Server]:
    """A running server of `leadout serve` that answers admin requests with `KEY`."""
    command = [sys.executable, "-m", "leadout", "serve", target, *words, *FLAGS]
    admin = {"LEADOUT_ADMIN_KEY": KEY}
    with Server([str(word) for word in command], log=log, environment=admin) as running:
        yield running


def served_drafter(url: str) -> Any:
    """What the server says of its drafter: version, watch, ..."""
    headers = {"Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{url}/leadout/drafter", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def wait_for(url: str, version: int, seconds: float = 120, every: float = 1.0) -> Any:
    """Wait for a server, which swaps some seconds after the pointer has changed."""
    deadline = time.monotonic() + seconds
    while (found := served_drafter(url))["version"] != version:
        if time.monotonic() > deadline:
            sys.exit(f"the server still has version {found['version']}, expected {version}")
        time.sleep(every)
    return found


def serve_version(url: str, registry: Path, version: int, why: str) -> None:
    """Point the registry to a version by hand, and wait until it is served."""
    pointer = Registry(registry).require_pointer()
    if pointer.version != version:
        Registry(registry).point_to(version, why)
    wait_for(url, version)


def ask_all(
    url: str, prompts: Sequence[list[int]], *, captured: bool, tokens: int
) -> list[str | None]:
    """Greedy answers in the order of the prompts; None where the request failed."""
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(lambda prompt: ask(url, prompt, captured, tokens), prompts))


def ask(url: str, prompt: list[int], captured: bool, tokens: int) -> str | None:
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "vllm_xargs": {"leadout_capture": "on" if captured else "off"},
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            text: str = json.load(response)["choices"][0]["text"]
            return text
    except OSError as problem:
        print(f"failed: {problem}", flush=True)
        return None


def counters(url: str) -> list[float]:
    """Steps with drafts, and accepted drafts, since the server started."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        rows = response.read().decode().splitlines()
    return [
        sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith(f"{name}{{"))
        for name in COUNTERS
    ]


@contextmanager
def counted(url: str) -> Iterator[dict[str, float]]:
    """Steps and accepted drafts of what is asked in the block."""
    found: dict[str, float] = {}
    earlier = counters(url)
    yield found
    now = counters(url)
    found.update(steps=now[0] - earlier[0], accepted=now[1] - earlier[1])


def measure(
    url: str, prompts: Sequence[list[int]], *, tokens: int, batch: int = BATCH, name: str = ""
) -> dict[str, Any]:
    """Greedy acceptance by vLLM's counters, in batches; none of it is captured."""
    batches, answers = [], []
    for start in track(range(0, len(prompts), batch), description=name):
        with counted(url) as found:
            some = prompts[start : start + batch]
            answers += ask_all(url, some, captured=False, tokens=tokens)
        batches.append(found)
    return {"prompts": len(prompts), "failed": answers.count(None), "batches": batches}


def length_of(measured: dict[str, Any]) -> Interval:
    """Acceptance length with a confidence interval over batches."""
    steps, accepted = _columns(measured)
    return bootstrap(len(steps), lambda draw: 1 + accepted[draw].sum(-1) / steps[draw].sum(-1))


def change_of(before: dict[str, Any], after: dict[str, Any]) -> Interval:
    """The relative change; the same prompts are in the same batches."""
    (old_steps, old), (new_steps, new) = _columns(before), _columns(after)

    def change(draw: torch.Tensor) -> torch.Tensor:
        was = 1 + old[draw].sum(-1) / old_steps[draw].sum(-1)
        return (1 + new[draw].sum(-1) / new_steps[draw].sum(-1)) / was - 1

    return bootstrap(len(old), change)


def _columns(measured: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    batches = measured["batches"]
    steps = torch.tensor([each["steps"] for each in batches], dtype=torch.float64)
    return steps, torch.tensor([each["accepted"] for each in batches], dtype=torch.float64)


class Learner:
    """`leadout learn` as a process, whose memory is watched; its results are lines of JSON.

    On two cores it has two threads, whatever the environment says for servers.
    """

    def __init__(self, log: Path, *words: object) -> None:
        command = [sys.executable, "-m", "leadout", "learn", *map(str, words), "--json"]
        self.log = log
        self._out = log.with_suffix(".out")
        self.began = time.monotonic()
        with log.open("wb") as errors, self._out.open("wb") as out:
            self.process = subprocess.Popen(
                command, env={**os.environ, "OMP_NUM_THREADS": "2"}, stdout=out, stderr=errors
            )
        self.memory = {"learner": 0, "with its processes": 0}  # largest, in bytes
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Resident memory, with the pages of the ring that it has read."""
        try:
            process = psutil.Process(self.process.pid)
            while self.process.poll() is None:
                own = _resident_bytes(process)
                rest = sum(map(_resident_bytes, process.children(recursive=True)))
                for name, found in (("learner", own), ("with its processes", own + rest)):
                    self.memory[name] = max(self.memory[name], found)
                time.sleep(MEMORY_SECONDS)
        except psutil.NoSuchProcess:
            pass

    def wait_until_it_says(self, text: str, seconds: float = 300) -> None:
        """Wait for a message, which is on its standard error."""
        deadline = time.monotonic() + seconds
        while text not in self.log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"leadout learn did not say {text!r}:\n{self._end_of_log()}")
            time.sleep(0.1)

    def last_line(self) -> str:
        return (self.log.read_text(errors="replace").splitlines() or [""])[-1]

    def result(self) -> Any:
        """Wait for the end of its only cycle; a rejected candidate has a result, too."""
        self.process.wait()
        text = self._out.read_text()
        if not text:
            sys.exit(f"leadout learn failed:\n{self._end_of_log()}")
        return json.loads(text)

    def results(self) -> list[Any]:
        """Of all cycles that have ended, if there are several."""
        return [json.loads(line) for line in self._out.read_text().splitlines() if line[:1] == "{"]

    def stop(self) -> None:
        """End it if it has not ended."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()

    def _end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


def events_of(registry: Path) -> list[dict[str, Any]]:
    """The ledger without its numbers."""
    return [entry.model_dump(exclude={"evidence"}) for entry in Registry(registry).ledger()]


def require_promoted(learnt: Any) -> None:
    if not learnt["promoted"]:
        sys.exit("rejected: " + "; ".join(learnt["decision"]["reasons"]))
