"""The cost of handing states to a learner: throughput by share of requests, and by reader.

    python experiments/learn_states_cost.py TARGET DRAFTER PROMPTS

One engine, as `leadout serve --learn-states` sets it up, answers the same prompts repeatedly; turns
of all arms alternate, so that nothing else differs. In the arms `none` and `none again` the drafter
has vLLM's own class, without the code that reads states, and all requests opt out; in the others it
has Leadout's, and the share of requests that do not opt out is 10% or all of them, as with
`--learn-rate`. Each ratio is taken within one round: the geometric mean over rounds with its 95%
interval. `none again` shows the noise. Besides the throughput, the CPU time of the engine's process
is compared, which other processes of the machine influence less, and the time that is spent on
copying states is measured.

Nobody reads the ring in these arms. In the last ones there is a reader in a process of its own, as
a learner has it: killed after it had begun to read, paused (SIGSTOP), and slow (it reads every five
seconds). Readers are paused in all turns but those of their own arm.

    --rounds 40: about half an hour on two idle cores
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import track

from common import ROOT, write_result
from leadout.data.prompts import read_prompts
from leadout.stats import paired_ratio

OUT = ROOT / "results" / "learn" / "states_cost.json"
REQUESTS = 20  # at a time; a tenth of them is a whole number
TOKENS = 32
WARM_UP = 2  # rounds
SHARES = {"none": 0.0, "none again": 0.0, "0.1": 0.1, "1.0": 1.0}
READERS = {"killed reader": "live", "paused reader": "live", "slow reader": "slow"}
ARMS = (*SHARES, *READERS)
_READER = """
import sys, time
from pathlib import Path
from leadout.ring.sequences import RingReader
reader = RingReader(Path(sys.argv[1]))
while True:
    reader.poll()
    print("read", flush=True)
    time.sleep(float(sys.argv[2]))
"""
_PAUSES = {"live": 0.5, "slow": 5.0}  # seconds between reads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ring", type=Path, default=Path("/dev/shm/leadout-states-cost"))
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    texts = [prompt.text for prompt in read_prompts([str(arguments.prompts)])]
    shutil.rmtree(arguments.ring, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            llm = start(arguments.target, arguments.drafter, Path(folder), arguments.ring)
            with Readers(arguments.ring) as readers:
                rounds = run(llm, texts, arguments.rounds, readers)
                written = states_in_ring(arguments.ring)
    finally:
        shutil.rmtree(arguments.ring, ignore_errors=True)
    ratios = {
        arm: {
            "throughput": ratio(rounds, arm, "tokens_per_second"),
            "cpu_time": ratio(rounds, arm, "cpu_seconds"),
        }
        for arm in ARMS[1:]
    }
    result = {
        "unit": "output tokens per second, and CPU seconds, relative to those without a ring",
        "requests_at_a_time": REQUESTS,
        "tokens_each": TOKENS,
        "throughput_ratio": {
            share: ratios[share]["throughput"] for share in SHARES if SHARES[share] > 0
        },
        "same_again": ratios["none again"],
        "cpu_time_ratio": {
            share: ratios[share]["cpu_time"] for share in SHARES if SHARES[share] > 0
        },
        "readers": {arm: ratios[arm] for arm in READERS},
        "share_of_time_in_tap": {arm: share_in_tap(rounds, arm) for arm in ARMS[2:]},
        "bytes_in_ring": written,
        "rounds": rounds,
    }
    models = {"target": arguments.target, "drafter": arguments.drafter}
    write_result(arguments.out, result, **models)


def ratio(rounds: list[dict[str, Any]], arm: str, what: str) -> dict[str, Any]:
    return paired_ratio([[row[arm][what] / row["none"][what] for row in rounds]]).model_dump()


def share_in_tap(rounds: list[dict[str, Any]], arm: str) -> float:
    """Of the elapsed time, spent on copying states into the ring; exact where ratios are noisy."""
    inside, total = (
        sum(row[arm][name] for row in rounds) for name in ("seconds_in_tap", "seconds")
    )
    return inside / total


def run(llm: Any, texts: list[str], count: int, readers: Readers) -> list[dict[str, Any]]:
    """Throughput and CPU time of every arm, by round."""
    switch = Switch(llm)
    found = []
    for number in track(range(count + WARM_UP), description="rounds"):
        prompts = [texts[(number * REQUESTS + place) % len(texts)] for place in range(REQUESTS)]
        first = number % len(ARMS)
        row = {}
        for arm in (*ARMS[first:], *ARMS[:first]):
            share = SHARES.get(arm, 1.0)
            switch.turn(on=share > 0)
            with readers.running(arm):
                row[arm] = turn(llm, prompts, round(share * REQUESTS), number)
            row[arm]["seconds_in_tap"] = switch.seconds
            time.sleep(0.1)  # what is left of a turn ends within it
        found.append(row)
    return found[WARM_UP:]


def turn(llm: Any, prompts: list[str], learnt_from: int, number: int) -> dict[str, float]:
    """One turn, in which so many of the requests do not opt out, other ones in each round."""
    from vllm import SamplingParams

    chosen = {
        (number + place * len(prompts) // learnt_from) % len(prompts)
        for place in range(learnt_from)
    }
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=TOKENS,
            ignore_eos=True,
            extra_args={"leadout_capture": "on" if place in chosen else "off"},
        )
        for place in range(len(prompts))
    ]
    cpu, began = _cpu_seconds(), time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "tokens_per_second": len(prompts) * TOKENS / seconds,
        "cpu_seconds": _cpu_seconds() - cpu,
    }


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Switch:
    """Gives the drafter vLLM's own class, and Leadout's subclass that reads states."""

    def __init__(self, llm: Any) -> None:
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        self._proposer = getattr(runner, "drafter", None) or runner.speculator
        self._tapped = type(self._proposer)
        if not self._tapped.__module__.startswith("leadout."):
            sys.exit(f"the drafter has the class {self._tapped}, expected one that reads states")
        self._plain = self._tapped.__mro__[1]
        self.seconds = 0.0  # spent on copying states since the turn began
        tap = self._proposer.leadout_tap
        add = tap.add

        def timed(*arguments: Any) -> None:
            began = time.perf_counter()
            try:
                add(*arguments)
            finally:
                self.seconds += time.perf_counter() - began

        tap.add = timed

    def turn(self, *, on: bool) -> None:
        self._proposer.__class__ = self._tapped if on else self._plain
        self.seconds = 0.0


class Readers:
    """The reading processes; each runs only in the turns of its arm."""

    def __init__(self, ring: Path) -> None:
        self._ring = ring
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Readers:
        for arm, kind in READERS.items():
            process = subprocess.Popen(
                [sys.executable, "-c", _READER, str(self._ring), str(_PAUSES[kind])],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            assert process.stdout is not None
            if not process.stdout.readline():
                sys.exit("a reader of the ring has ended")
            process.send_signal(signal.SIGKILL if arm == "killed reader" else signal.SIGSTOP)
            self._processes[arm] = process
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    @contextmanager
    def running(self, arm: str) -> Iterator[None]:
        """Let the slow reader run in its own arm; the killed and the paused one never run."""
        process = self._processes.get(arm) if arm == "slow reader" else None
        if process is None:
            yield
            return
        process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            process.send_signal(signal.SIGSTOP)


def start(target: str, drafter: Path, folder: Path, ring: Path) -> Any:
    """An engine in this process with the flags of `leadout serve --learn-states`."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    from leadout.engine.serve_plan import make_plan
    from leadout.engine.settings import ServeSettings
    from leadout.engine.vllm_flags import parse
    from leadout.learn.cycle import start_registry

    start_registry(target, str(folder / "registry"), str(drafter))
    flags = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    # All turns of a round have the same prompts.
    flags += ["--max-num-seqs", str(REQUESTS), "--no-enable-prefix-caching"]
    settings = ServeSettings(
        target=target,
        registry=str(folder / "registry"),
        learn_states=ring,
        learn_rate=1.0,
        vllm_flags=tuple(flags),
    )
    plan = make_plan(settings)
    os.environ.update(plan.environment)
    given = vars(parse(target, plan.command[plan.command.index(target) + 1 :]))
    usual = vars(parse(target, []))
    names = {field.name for field in dataclasses.fields(EngineArgs)} - {"model"}
    names &= given.keys()  # some fields have no flag
    chosen = {name: given[name] for name in names if given[name] != usual[name]}
    return LLM(model=target, **chosen)


def states_in_ring(ring: Path) -> int:
    """Bytes of states that are in the ring now; none would mean that nothing was measured."""
    from leadout.ring.sequences import RingReader

    reader = RingReader(ring)
    try:
        found = sum(sequence.states.nbytes for sequence in reader.poll())
    finally:
        reader.close()
    if not found:
        sys.exit("the ring is empty: the engine has written no states")
    return found


if __name__ == "__main__":
    main()
