"""Faults on live servers for half an hour: which answers change, which requests fail?

Two replicas of a tiny random target serve one registry behind a proxy, in float32, with one thread
each. Clients ask for greedy answers all the time, and once a minute something happens: the engine
process is stopped or killed, the disk is full, slow or unreachable, a server is told to end and
starts again, a bad version is published, a learner is killed:

    python experiments/chaos.py --minutes 30 --out results/reliability/chaos.json

A publisher of random drafters stands for the learner. The disk is a small file system in memory,
which is really full, where the system lets us mount one; a hook inside the servers makes it slow
or unreachable (`tests/support/fake_disk`).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import provenance, write_result
from support.chaos import CLIENTS, FAULTS, Chaos, Pace
from support.chaos_world import bare_answers, disk, make_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seconds-between", type=float, default=60)
    parser.add_argument("--hold", type=float, default=15, help="seconds for which a fault lasts")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    pace = Pace(
        slot=arguments.seconds_between,
        hold=arguments.hold,
        min_life=min(600.0, 30 * arguments.minutes),
    )
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        target = make_target(work / "target")
        with disk(work, may_mount=True) as folder:
            chaos = Chaos(work, folder, target, bare(target), pace)
            try:
                chaos.run(itertools.cycle(arguments.faults), 60 * arguments.minutes)
            finally:
                for log in work.glob("*.log"):
                    log.rename(Path(tempfile.gettempdir()) / f"chaos-{log.name}")
            samples, wrong = chaos.wrong_samples()
            result = summary(chaos) | {
                "captured_samples": samples,
                "captured_samples_that_are_wrong": wrong,
                "disk": "tmpfs" if folder.is_mounted else "folder, full only inside the servers",
            }
    write_result(arguments.out, result)


def bare(target: Path) -> list[tuple[list[int], list[int]]]:
    from vllm import LLM

    settings: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8}
    llm = LLM(model=str(target), dtype="float32", enforce_eager=True, **settings)
    try:
        return bare_answers(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def summary(chaos: Chaos) -> dict[str, Any]:
    seen, done = chaos.traffic.seen, chaos.disturbances
    command = provenance()["command"]  # the run as it was made, however short
    classes = []
    for fault in dict.fromkeys(each.fault for each in done):
        cases = [each for each in done if each.fault == fault]
        lost = sum(len(each.lost) for each in cases)
        classes.append({"name": fault, "cases": len(cases), "lost": lost, "command": command})
    grown = [asdict(each) for each in chaos.grown()]
    lost = sum(len(each.lost) for each in done) + len(grown)
    unexplained = [each for each in seen.failures if not chaos.is_explained(each)]
    return {
        "name": "chaos on live servers",
        "cases": len(done),
        "lost": lost,
        "command": command,
        "replicas": len(chaos.replicas),
        "clients": CLIENTS,
        "seconds": round(done[-1].at + done[-1].seconds, 1) if done else 0.0,
        "answers": seen.answers.total(),
        "changed_answers": len(seen.changed),
        "failed_at_killed_replica": len(seen.failures) - len(unexplained),
        "failed_elsewhere": len(unexplained),
        "longest_request_seconds": round(seen.longest, 1),
        "limit_seconds_to_pointer": chaos.pace.limit,
        "classes": classes,
        "timeline": [asdict(each) for each in done],
        "growth_limits": {
            "memory_share": chaos.pace.max_growth,
            "descriptors": chaos.pace.max_descriptors,
        },
        "growth": [asdict(each) for each in chaos.growth],
        "grown": grown,
    }


if __name__ == "__main__":
    main()
