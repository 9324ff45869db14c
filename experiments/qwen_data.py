"""Answers of Qwen2.5-Coder-1.5B-Instruct to train its drafter on, generated in several sittings.

    python examples/make_qwen_coder.py QWEN
    python examples/quantize_int8.py QWEN TARGET
    python experiments/qwen_data.py TARGET PROMPTS_FOLDER WORK_FOLDER --minutes 60
    python experiments/qwen_data.py TARGET PROMPTS_FOLDER WORK_FOLDER --unpack

Continues from the answers in experiments/data/, or from those in WORK_FOLDER if there are any, and
packs all of them into experiments/data/ again: every ten minutes, and at the end. Commit that
folder to continue on another machine. With `--unpack` the answers are only restored, into
WORK_FOLDER/data, to train on. Prompts of the prompt files are not packed but made again from them;
those that the target wrote are packed. The prompts are shuffled, so that any part of the job is a
representative sample of it. No evaluation set is used.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common import ROOT
from leadout.data.answers import Conversation, fitted_prompt
from leadout.data.chat import Chat
from leadout.data.manifest import DataFolder
from leadout.data.packed import pack, unpack
from leadout.data.prompts import read_prompts, source_name
from leadout.shards import Sample

PACKED = ROOT / "experiments" / "data" / "qwen2.5-coder-1.5b-int8"
PROMPTS = ("mbpp_train.jsonl", "code_train.jsonl", "gsm8k_train.jsonl", "chat_train.jsonl")
WRITTEN_BY_THE_TARGET = 500  # prompts
LIMIT = 900  # prompts of each file
MAX_NEW_TOKENS = 384
MAX_LENGTH = 1024
SECONDS_BETWEEN_PACKS = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--packed", type=Path, default=PACKED)
    parser.add_argument("--minutes", type=float, default=60, help="stop after this time")
    parser.add_argument("--concurrency", type=int, default=64, help="requests of each process")
    parser.add_argument("--cores", default="0,1", help="one process runs on each of them")
    parser.add_argument("--unpack", action="store_true", help="only restore the answers")
    arguments = parser.parse_args()
    data, packed = arguments.work / "data", arguments.packed
    sources = [str(arguments.prompts / name) for name in PROMPTS]
    if packed.exists():
        unpack(packed, data, prompts_again(arguments.target, sources))
    if not arguments.unpack:
        try:
            generate(arguments, data, sources)
        finally:  # also if it was interrupted
            if any(data.glob("manifest-*.json")):
                pack_answers(data, packed)
    found = DataFolder(data)
    print(f"{data}: {len(found.samples())} answers of {found.response_tokens:,} tokens")


def pack_answers(data: Path, packed: Path) -> None:
    published = {source_name(name) for name in PROMPTS}
    pack(data, packed, lambda sample: sample.source in published)


def prompts_again(target: Path, sources: list[str]) -> Callable[[Sample], list[int]]:
    """The token ids of the prompts in the prompt files, all of which have one turn."""
    chat = Chat(target)
    prompts = {prompt.id: prompt for prompt in read_prompts(sources, LIMIT, lambda *_: None)}

    def prompt_of(sample: Sample) -> list[int]:
        prompt = prompts[sample.id.rpartition("#")[0]]
        conversation = Conversation(sample.id, prompt.source, list(prompt.turns), greedy=False)
        return fitted_prompt(chat, conversation, MAX_LENGTH - MAX_NEW_TOKENS).tokens

    return prompt_of


def generate(arguments: argparse.Namespace, data: Path, sources: list[str]) -> None:
    """Answer prompts until the job is complete or the time is over."""
    ends = time.monotonic() + 60 * arguments.minutes
    cores = arguments.cores.split(",")
    started = data.exists() and any(data.glob("manifest-*.json"))
    processes = []
    for number, core in enumerate(cores, start=1):
        command = [
            *("taskset", "-c", core, sys.executable, "-m", "leadout", "data", arguments.target),
            *("--out", data, "--shard", f"{number}/{len(cores)}"),
            *(word for source in sources for word in ("--prompts", source)),
            *("--prompts", f"self:{WRITTEN_BY_THE_TARGET}", "--limit", LIMIT),
            *("--max-new-tokens", MAX_NEW_TOKENS, "--max-length", MAX_LENGTH),
            # The kernels for int8 on processors with AMX do not accept float32.
            *("--dtype", "bfloat16", "--concurrency", arguments.concurrency),
            *(["--resume"] if started else []),
            *("--", "--enforce-eager"),
        ]
        environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": core, "OMP_NUM_THREADS": "1"}
        words = [str(word) for word in command]
        processes.append(subprocess.Popen(words, env=environment))
    packs_at = time.monotonic() + SECONDS_BETWEEN_PACKS
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < ends:
            time.sleep(1)
            if time.monotonic() >= packs_at:
                pack_answers(data, arguments.packed)
                packs_at = time.monotonic() + SECONDS_BETWEEN_PACKS
    finally:
        stopped = [process for process in processes if process.poll() is None]
        for process in stopped:
            process.send_signal(signal.SIGINT)  # it keeps what is answered
        codes = [process.wait() for process in processes if process not in stopped]
        for process in stopped:
            process.wait()
    if any(codes):
        sys.exit("leadout data ended with an error, see above")


if __name__ == "__main__":
    main()
