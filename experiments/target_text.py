"""Answers of the targets to train their drafters on, generated in several sittings.

    python experiments/target_text.py TARGET PROMPTS_FOLDER WORK_FOLDER --minutes 60
    python experiments/target_text.py TARGET PROMPTS_FOLDER WORK_FOLDER --unpack

The name of TARGET's folder says which job it is: smollm2-135m-instruct (made by
examples/make_smollm2.py) or qwen2.5-coder-1.5b-int8 (examples/make_qwen_coder.py, then
examples/quantize_int8.py). Continues from the answers in experiments/data/NAME, or from those in
WORK_FOLDER if there are any, and packs all of them into experiments/data/NAME again: every ten
minutes, and at the end. Commit that folder to continue on another machine. With `--unpack` the
answers are only restored, into WORK_FOLDER/data, to train on. Prompts of the prompt files are not
packed but made again from them; those that the target wrote are packed. The prompts are shuffled,
so that any part of the job is a representative sample of it. No evaluation set is used.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import ROOT
from leadout.data.answers import Conversation, fitted_prompt
from leadout.data.chat import Chat
from leadout.data.manifest import DataFolder
from leadout.data.packed import pack, unpack
from leadout.data.prompts import read_prompts, source_name
from leadout.shards import Sample

SECONDS_BETWEEN_PACKS = 600


@dataclass(frozen=True)
class Job:
    prompts: tuple[str, ...]
    limit: int  # prompts of each file
    by_the_target: int  # prompts that it writes itself
    greedy_share: float
    max_new_tokens: int
    dtype: str
    max_length: int = 1024

    @property
    def published(self) -> frozenset[str]:
        """The sources whose prompts are not packed."""
        return frozenset(source_name(name) for name in self.prompts)


JOBS = {
    "qwen2.5-coder-1.5b-int8": Job(
        prompts=("mbpp_train.jsonl", "code_train.jsonl", "gsm8k_train.jsonl", "chat_train.jsonl"),
        limit=900,
        by_the_target=500,
        greedy_share=0.5,
        max_new_tokens=384,
        dtype="bfloat16",  # vLLM's int8 kernels for AMX do not accept float32
    ),
    "smollm2-135m-instruct": Job(
        prompts=("gsm8k_train.jsonl", "mbpp_train.jsonl", "code_train.jsonl", "chat_train.jsonl"),
        limit=4000,
        by_the_target=3000,
        greedy_share=0.75,
        max_new_tokens=256,
        dtype="bfloat16",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--packed", type=Path, help="instead of experiments/data/NAME")
    parser.add_argument("--minutes", type=float, default=60, help="stop after this time")
    parser.add_argument("--concurrency", type=int, default=64, help="requests of each process")
    parser.add_argument("--cores", default="0,1", help="one process runs on each of them")
    parser.add_argument("--unpack", action="store_true", help="only restore the answers")
    arguments = parser.parse_args()
    if arguments.target.name not in JOBS:
        parser.error(f"the target's folder must be named {' or '.join(JOBS)}")
    job = JOBS[arguments.target.name]
    packed = arguments.packed or packed_folder(arguments.target)
    if packed.exists():
        restore(packed, arguments.target, arguments.prompts, arguments.work)
    data = arguments.work / "data"
    if not arguments.unpack:
        try:
            generate(arguments, job, data, packed)
        finally:  # also if it was interrupted
            if any(data.glob("manifest-*.json")):
                pack_answers(job, data, packed)
    found = DataFolder(data)
    print(f"{data}: {len(found.samples())} answers of {found.response_tokens:,} tokens")


def packed_folder(target: Path) -> Path:
    return ROOT / "experiments" / "data" / target.name


def pack_answers(job: Job, data: Path, packed: Path) -> None:
    pack(data, packed, lambda sample: sample.source in job.published)


def restore(packed: Path, target: Path, prompts: Path, work: Path) -> None:
    """The packed answers in `work`/data, with the prompts of the prompt files again."""
    unpack(packed, work / "data", prompts_again(target, prompts))


def prompts_again(target: Path, folder: Path) -> Callable[[Sample], list[int]]:
    """The token ids of the prompts in the prompt files, all of which have one turn."""
    job, chat = JOBS[target.name], Chat(target)
    sources = [str(folder / name) for name in job.prompts]
    prompts = {prompt.id: prompt for prompt in read_prompts(sources, job.limit, lambda *_: None)}

    def prompt_of(sample: Sample) -> list[int]:
        prompt = prompts[sample.id.rpartition("#")[0]]
        conversation = Conversation(sample.id, prompt.source, list(prompt.turns), greedy=False)
        return fitted_prompt(chat, conversation, job.max_length - job.max_new_tokens).tokens

    return prompt_of


def generate(arguments: argparse.Namespace, job: Job, data: Path, packed: Path) -> None:
    """Answer prompts until the job is complete or the time is over."""
    ends = time.monotonic() + 60 * arguments.minutes
    cores = arguments.cores.split(",")
    started = data.exists() and any(data.glob("manifest-*.json"))
    own = ("--prompts", f"self:{job.by_the_target}") if job.by_the_target else ()
    processes = []
    for number, core in enumerate(cores, start=1):
        command = [
            *("taskset", "-c", core, sys.executable, "-m", "leadout", "data", arguments.target),
            *("--out", data, "--shard", f"{number}/{len(cores)}"),
            *(word for name in job.prompts for word in ("--prompts", arguments.prompts / name)),
            *(*own, "--limit", job.limit, "--greedy-share", job.greedy_share),
            *("--max-new-tokens", job.max_new_tokens, "--max-length", job.max_length),
            *("--dtype", job.dtype, "--concurrency", arguments.concurrency),
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
                pack_answers(job, data, packed)
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
