"""Tables on Qwen2.5-Coder-1.5B: cost and gain of its drafter, acceptance and training."""

from __future__ import annotations

from typing import Any

import result_tables
from result_tables import blocks_of, result, same_again, speedup, table

BENCH = "bench/qwen2.5-coder-1.5b.json"
PROFILE = "bench/qwen2.5-coder-1.5b-profile.json"
TUNED = "bench/qwen2.5-coder-1.5b-tuned.json"
TRAINING = "train/qwen2.5-coder-1.5b.json"
PLAN = "make/qwen2.5-coder-1.5b-plan.json"
CHOSEN = "chosen"  # the run with `tuned` and `live`; each other one has two fixed lengths
CHOSEN_ARMS = ("tuned", "live")


def best_at(batch: int) -> tuple[str, dict[str, Any]]:
    """The fastest K at a batch size, and its speed-up."""
    found: dict[str, Any] = result(TUNED)["speedup"][str(batch)]
    best = max(found, key=lambda k: float(found[k]["value"]))
    return best, found[best]


def tuned() -> str:
    """What a step takes without drafts and with the best K, and the speed-up."""
    found = result(TUNED)
    rows = []
    for batch in found["speedup"]:
        k, gain = best_at(int(batch))
        bare, verify, draft = (
            1000 * found[part][batch][number]["value"]
            for part, number in (("verify", "0"), ("verify", k), ("draft", k))
        )
        gained = result_tables.interval(gain)
        rows.append((batch, f"{bare:.0f}", k, f"{verify:.0f}", f"{draft:.0f}", gained))
    heads = ("concurrent requests", "step without drafts, ms", "K", "verifying, ms", "drafting, ms",
             "speed-up")  # fmt: skip
    return table(heads, rows)


def lengths() -> str:
    """The speed-up of every K at every load."""
    found: dict[str, dict[str, Any]] = result(TUNED)["speedup"]
    lengths = [k for k in next(iter(found.values())) if k != "0"]
    rows = [
        [f"K = {k}", *(result_tables.interval(found[batch][k]) for batch in found)] for k in lengths
    ]
    return table(["concurrent requests", *found], rows)


def mean_at(load: int, arm: str = "tuned") -> dict[str, Any]:
    """The speed-up of an arm over both prompt sets."""
    found: dict[str, Any] = next(
        each
        for each in result(BENCH)["geometric_means"]
        if each["arm"] == arm and each["concurrency"] == load
    )
    return found


def bench() -> str:
    """By arm; `tuned` and `live` by prompt set, too; and the error of the method."""
    found = result(BENCH)
    loads = sorted({cell["concurrency"] for cell in found["cells"]})
    sets = sorted({cell["prompt_set"] for cell in found["cells"]})
    measured = [*found["cells"], *found["geometric_means"]]  # the latter of no single set
    cells = {
        (each["arm"], each.get("prompt_set"), each["concurrency"]): speedup(each)
        for each in measured
        if not each["arm"].startswith("bare")
    }
    rows: list[list[str]] = []
    arms = dict.fromkeys(each["arm"] for each in found["geometric_means"])
    for arm in sorted(arms, key=lambda arm: arm in CHOSEN_ARMS):  # fixed lengths first
        for name in [*(sets if arm in CHOSEN_ARMS else ()), None]:
            by_load = (cells.get((arm, name, load), "-") for load in loads)
            rows.append([f"{arm}, {name or 'both sets'}", *by_load])
    again: dict[str, dict[int, dict[str, Any]]] = {}
    for each in found["bare_against_bare"]:
        beside = "" if each["run"] == CHOSEN else f", beside K = {each['run']}"
        again.setdefault(f"bare vLLM again (A/A){beside}", {})[each["concurrency"]] = each
    rows += [
        [name, *(same_again(by_load[load]) if load in by_load else "-" for load in loads)]
        for name, by_load in again.items()
    ]
    return table(["concurrent requests", *map(str, loads)], rows)


def settings() -> dict[str, Any]:
    """Of the bench of `tuned` and `live`."""
    found: dict[str, Any] = result(BENCH)["runs"][CHOSEN]["settings"]
    return found


def bench_rounds() -> str:
    """What a cell of the bench consists of."""
    used = settings()
    text = f"{used['rounds']} rounds, in which every server runs for {used['seconds']:g} s"
    others = {name: run["settings"] for name, run in result(BENCH)["runs"].items()}
    del others[CHOSEN]
    fixed = [
        f"K = {name}: {each['rounds']} of {each['seconds']:g} s" for name, each in others.items()
    ]
    if fixed:
        text += f" ({', '.join(fixed)})"
    return f"{text}; answers have {used['output_tokens']} tokens. 95% intervals in brackets."


def profile() -> str:
    return result_tables.profile(PROFILE)


def selection() -> str:
    """Choosing drafts with and without logits over the target's vocabulary, and the step."""
    found = result(PROFILE)
    ways = {
        "with logits over the target's vocabulary": found[
            "with_logits_over_the_targets_vocabulary"
        ],
        "as served": found["by_batch_size"],
    }
    loads = list(found["by_batch_size"])
    rows = []
    for what, parts in (
        ("head and choice of drafts", ("drafter, head", "drafter, the rest")),
        ("step", ("step",)),
    ):
        for way, by_load in ways.items():
            times = [sum(by_load[load][part] for part in parts) for load in loads]
            rows.append([f"{what}, {way}", *(f"{each:.1f}" for each in times)])
    return table(["milliseconds, concurrent requests", *loads], rows)


def acceptance() -> str:
    return result_tables.acceptance_sets(TRAINING)


def training() -> str:
    """Text, time and the curve on held-out answers, of one run after the other, and remarks."""
    found = result(TRAINING)
    rows: list[tuple[str, ...]] = []
    remarks = ""
    for number, run in enumerate(found["runs"], start=1):
        curve = ", ".join(
            f"{point['acceptance_length']:.2f} after {point['minutes']:.0f} minutes"
            for point in run["held_out_curve"]
        )
        row = (
            f"{run['data_response_tokens']:,} tokens",
            f"{run['minutes']:.0f} minutes, {blocks_of({'runs': [run]}):,} blocks",
            curve,
        )
        rows.append((str(number), *row))
        if "remark" in run:
            remarks += f"\n\nRun {number}: {run['remark']}"
    header = ("run", "text", "training", "acceptance length on held-out answers")
    return table(header, rows) + remarks


def plan() -> str:
    """The times that `leadout make` expects of its stages."""
    found = result(PLAN)["plan"]
    rows = [(each["name"], f"{each['minutes']:.0f}", each["what"]) for each in found["stages"]]
    every = sum(each["minutes"] for each in found["stages"])
    return table(("stage", "minutes, about", "what"), [*rows, ("all", f"{every:.0f}", "")])
