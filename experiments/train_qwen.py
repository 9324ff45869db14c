"""Make the drafter of Qwen2.5-Coder-1.5B-Instruct in int8: states, training, acceptance.

    python examples/make_qwen_coder.py QWEN
    python examples/quantize_int8.py QWEN TARGET
    python experiments/train_qwen.py TARGET PROMPTS_FOLDER WORK_FOLDER

Trains on the answers in experiments/data/ (experiments/target_text.py wrote them), measures
acceptance on the evaluation sets and writes results/train/qwen2.5-coder-1.5b.json. Every stage
continues where an earlier call was interrupted. With `--initial` a run continues from the shipped
drafter, and the result has its runs, too. Two servers make the target's states, one on each
core; training then uses both cores, and one server stays for texts whose states are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from common import ONE_THREAD, ROOT, link_states
from leadout.data.manifest import DataFolder
from leadout.evaluate.hidden_states import StatesOnDisk, announce
from leadout.evaluate.ranks import Ranks
from leadout.evaluate.served_states import states_from
from leadout.models import fingerprint
from leadout.pairing import read_target
from leadout.train.config import TrainConfig
from leadout.train.run import Run, complete_settings, read_corpus
from target_text import packed_folder, restore
from train_smollm2 import EVALUATION_SETS, RUN, run, write_result

SETTINGS = ROOT / "examples" / "qwen2.5-coder-drafter.yaml"
RESULT = ROOT / "results" / "train" / "qwen2.5-coder-1.5b.json"
THIS_PROCESS = Ranks(0, 1, torch.device("cpu"))
STATES = "states"  # a folder like that of a run, which only has states
LEADOUT = (sys.executable, "-m", "leadout")
PORTS = (18311, 18312)
START_SECONDS = 600
SEQUENCES = 64  # between reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--epochs", type=float, default=6, help="passes over the answers")
    parser.add_argument("--initial", type=Path, help="continue from this drafter")
    parser.add_argument("--learning-rate", type=float, help="instead of that of the settings")
    parser.add_argument("--remark", help="what the settings of the run do not say")
    parser.add_argument("--count", type=int, default=40, help="prompts of each evaluation set")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer to them")
    arguments = parser.parse_args()
    target, work = arguments.target, arguments.work
    restore(packed_folder(target), target, arguments.prompts, work)
    drafter = work / RUN / "drafter"
    if not drafter.exists():
        train(target, work, training_flags(arguments))
    measured = work / "acceptance.json"
    if not measured.exists():
        sets = [str(arguments.prompts / f"{name}.jsonl") for name in EVALUATION_SETS]
        script = ROOT / "experiments" / "train_acceptance.py"
        flags = ["--out", measured]
        flags += ["--count", arguments.count, "--tokens", arguments.tokens]
        run([sys.executable, script, target, drafter, *sets, *flags])
    earlier = runs_of(arguments.initial)
    write_result(RESULT, target, drafter, work, measured, earlier, arguments.remark)


def runs_of(drafter: Path | None) -> list[Any]:
    """How the drafter that training continues was made, if it is the one of the result."""
    if drafter is None or not RESULT.exists():
        return []
    found = json.loads(RESULT.read_text())
    made = found["provenance"]["models"]["drafter"] == fingerprint(drafter)
    return list(found["runs"]) if made else []


def training_flags(arguments: argparse.Namespace) -> list[object]:
    flags: list[object] = ["--epochs", arguments.epochs]
    if arguments.initial is not None:
        flags += ["--initial", arguments.initial.resolve()]
    if arguments.learning_rate is not None:
        flags += ["--learning-rate", arguments.learning_rate]
    return flags


def train(target: Path, work: Path, settings_of_call: list[object]) -> None:
    """Compute the states of all samples, then train on them with two processes."""
    settings = TrainConfig.resolve({}, SETTINGS)
    data, vocab_size = DataFolder(work / "data"), read_target(target).vocab_size
    corpus = read_corpus(data, target, settings, vocab_size)
    settings = complete_settings(settings, target, corpus, vocab_size)
    taps = settings.target_layer_ids
    assert taps is not None
    with ExitStack() as stack:
        servers = [stack.enter_context(states_server(target, taps, core)) for core in (0, 1)]
        urls = [wait_for(core, server) for core, server in enumerate(servers)]
        with states_from(
            urls,
            target,
            taps,
            longest=settings.max_length,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        ) as states:
            filled = Run(target, corpus, settings, work / STATES, THIS_PROCESS, states=states)
            source = filled.source
            assert isinstance(source, StatesOnDisk)
            every = [filled.fetch(i) for i in (*corpus.split.validation, *corpus.split.train)]
            announce(source, every)
            started, done = time.monotonic(), 0
            for number, item in enumerate(every, start=1):
                source.fill([item])
                done += len(item[1].tokens)
                if number % SEQUENCES == 0:
                    rate = done / (time.monotonic() - started)
                    print(f"states of {done:,} tokens, {rate:.0f} per second", flush=True)
            filled.release()
        servers[1].terminate()
        servers[1].wait()
        out = work / RUN
        if not (out / "run").exists():
            link_states(work / STATES, out)
        resume = ["--resume"] if (out / "training.yaml").exists() else []
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        flags = ("--data", (work / "data").resolve(), "--out", out.resolve(), *settings_of_call)
        server = ("--config", SETTINGS, "--states-from", urls[0])
        engine = ("--", "--enforce-eager")
        # The name of the target is written into the drafter, so it is no path of this machine.
        ranks = ("--nproc-per-node", 2, "-m", "leadout", "train", target.name)
        run([*torchrun, *ranks, *flags, *server, *resume, *engine], folder=target.parent)


@contextmanager
def states_server(
    target: Path, taps: tuple[int, ...], core: int
) -> Iterator[subprocess.Popen[bytes]]:
    """A server of states that runs on one core."""
    layers = [word for tap in taps for word in ("--layers", str(tap))]
    command = [
        *("taskset", "-c", str(core), *LEADOUT, "serve", str(target), "--states", *layers),
        *("--port", str(PORTS[core]), "--dtype", "bfloat16", "--max-model-len", "1025"),
        "--enforce-eager",
    ]
    # With the memory settings of `ALONE`, what was needed while loading would never be returned.
    environment = {**os.environ, **ONE_THREAD}
    process = subprocess.Popen(command, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_for(core: int, server: subprocess.Popen[bytes]) -> str:
    """The URL of a server, once it answers."""
    url, ends = f"http://127.0.0.1:{PORTS[core]}", time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < ends:
        with suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return url
        time.sleep(1)
    sys.exit("a server of states did not start, see above")


if __name__ == "__main__":
    main()
