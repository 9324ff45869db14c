"""Tables on learning from traffic; see fill_docs.py."""

from statistics import median
from typing import Any

from result_tables import interval, result, table

# Names for keys of results/learn/capture.json.
_CAPTURED = {"capture": "every request", "refusing disk": "every request, disk refuses writes"}
# Names for gates of results/learn/gate_cycles.json.
_GATES = {
    "today": "both comparisons, lower bounds, other sequences in every cycle",
    "before": "serving version only, lower bounds, the same sequences",
    "point estimates": "serving version only, point estimates, the same sequences",
}
# Names for keys of results/learn/states_cost.json.
_READERS = {"killed reader": "killed", "paused reader": "paused", "slow reader": "slow"}
_CPU_TIME = {
    "at the end of a request": "CPU time when requests end",
    "in its thread": "CPU time of the capture thread",
}


def gate() -> str:
    rows = [
        (
            each["name"],
            "passed" if each["passed"] else "rejected",
            _change(each["traffic"] and each["traffic"]["change"]),
            _change(each["base"] and each["base"]["change"]),
        )
        for each in result("learn/gate.json")["candidates"]
    ]
    return table(("candidate", "gate", "newest traffic", "base"), rows)


def gate_cycles() -> str:
    """Total change on the base after ten cycles of losing candidates, by gate."""
    found = result("learn/gate_cycles.json")
    rows = []
    for name, each in found["losing"].items():
        low, median, high = (_percent(change) for change in each["total_base_change"].values())
        rows.append(
            (
                _GATES[name],
                f"{each['promoted_mean']:.1f} of {found['cycles']}",
                f"{median} ({low} to {high})",
                _percent(each["worst"]),
            )
        )
    runs = found["repetitions"]["losing"]
    heads = ("gate", "promoted", "total change on the base, median (95% of the runs)")
    return table((*heads, f"worst of {runs} runs"), rows)


def gate_power() -> str:
    """How often a candidate without loss passes, by gate and number of newest requests."""
    rates = result("learn/gate_cycles.json")["pass_rates"]
    counts = sorted({each["held_out"] for each in rates})
    found = {(each["gate"], each["held_out"]): each["rate"] for each in rates}
    rows = [
        (_GATES[name], *(f"{found[name, count]:.0%}" for count in counts))
        for name in dict.fromkeys(each["gate"] for each in rates)
    ]
    return table(("gate", *(f"{count} requests" for count in counts)), rows)


def swaps() -> str:
    found = result("learn/swaps.json")
    pauses = found["pause_seconds_in_the_worker"]
    rows = [
        ("swaps, greedy answers", f"{found['swaps']}, {found['answers']}"),
        ("failed requests", found["failed_requests"]),
        ("answers that differ from bare vLLM's", found["changed_answers"]),
        (
            "duration of a swap in the worker",
            f"{1000 * min(pauses):.1f} to {1000 * max(pauses):.1f} ms",
        ),
        ("longest gap between tokens at a swap", _ms(found["longest_gap_at_a_swap"])),
        ("longest gap elsewhere", _ms(found["longest_gap_elsewhere"])),
        ("median gap elsewhere", _ms(found["median_gap_elsewhere"])),
    ]
    return table((f"{found['clients']} clients, float32", "measured"), rows)


def chaos_run() -> str:
    """A sentence on the run as a whole."""
    found = result("reliability/chaos.json")
    return (
        f"{found['seconds'] / 60:.0f} minutes, {found['answers']} answers, of which "
        f"{found['changed_answers']} differ from bare vLLM's; {found['failed_elsewhere']} requests "
        f"failed that were not at a killed engine."
    )


def chaos() -> str:
    found = result("reliability/chaos.json")
    rows = []
    for each in found["classes"]:
        seconds = [
            case["seconds_to_pointer"]
            for case in found["timeline"]
            if case["fault"] == each["name"] and case["seconds_to_pointer"] is not None
        ]
        slowest = f"{max(seconds):.1f} s" if seconds else ""
        rows.append((each["name"], each["cases"], slowest, each["lost"]))
    titles = ("fault", "cases", "slowest server on the pointer's version after", "lost")
    return table(titles, rows)


def adversary() -> str:
    """Removed versions over all kinds of hostile or changing traffic that must keep a bound."""
    cells = result("reliability/adversary.json")["cells"]
    bound = [cell for cell in cells if cell["is_bound"]]
    rows = []
    for servers in sorted({cell["servers"] for cell in bound}):
        shown = []
        for is_bad in (False, True):
            found = [
                cell
                for cell in bound
                if cell["servers"] == servers and (cell["below_promise"] > 0) == is_bad
            ]
            runs, removed = (sum(cell[name] for cell in found) for name in ("runs", "removed"))
            shown.append(f"{removed} of {runs} ({removed / runs:.1%})")
        rows.append((servers, *shown))
    heads = ("servers", "good versions removed", "versions 10% below their promise removed")
    return table(heads, rows)


def swap_size() -> str:
    rows = [
        (
            f"{cell['parameters'] / 1e9:.2f} billion",
            _ms(median(cell["bare_copy_seconds"])),
            f"{_ms(median(cell['pause_seconds']))} ({cell['ratio']:.2f})",
            _ms(cell["reload_seconds"]),
        )
        for cell in result("swap/size.json")["cells"]
        if cell["kind"] == "copied"
    ]
    titles = ("parameters, bfloat16", "bare copy", "pause (of a bare copy)", "vLLM's reload")
    return table(titles, rows)


def capture() -> str:
    found = result("learn/capture.json")
    rows = [
        (
            _CAPTURED[arm],
            interval(ratio),
            *(f"{share:.4%}" for share in found["share_of_the_time"][arm].values()),
        )
        for arm, ratio in found["ratio"].items()
    ]
    heads = ("captured", "throughput relative to no capture (95% interval)")
    shares = next(iter(found["share_of_the_time"].values()))
    return table([*heads, *(_CPU_TIME[where] for where in shares)], rows)


def states_cost() -> str:
    """Throughput with a ring relative to none, and the time spent on copying, by share."""
    found = result("learn/states_cost.json")
    times = found["share_of_time_in_tap"]
    rows: list[tuple[object, ...]] = [
        (f"{float(share):.0%}", "none", interval(ratio), f"{times[share]:.2%}")
        for share, ratio in found["throughput_ratio"].items()
    ]
    rows += [
        ("100%", name, interval(found["readers"][key]["throughput"]), f"{times[key]:.2%}")
        for key, name in _READERS.items()
    ]
    rows.append(
        ("no ring, measured twice", "none", interval(found["same_again"]["throughput"]), "")
    )
    heads = ("share of requests", "learner", "throughput relative to no ring (95% interval)")
    made = table((*heads, "time spent on copying"), rows)
    pairs = found["same_again"]["throughput"]["pairs"]
    return f"{made}\n\n{pairs} rounds, {found['requests_at_a_time']} requests at a time."


def states() -> str:
    """Both learners, for each kind and seed."""
    found = result("learn/states.json")
    rows = [
        (
            kind,
            row["seed"],
            arm,
            interval(row["acceptance_before"]),
            interval(row["acceptance_after"]),
            f"{row['seconds_to_swap']:.0f} s",
            f"{row['memory_bytes']['with its processes'] / 2**30:.1f} GiB",
        )
        for kind in found["files"]
        for seed in range(len(found["files"][kind]))
        for arm in ("files", "ring")
        for row in (found[arm][kind][seed],)
    ]
    heads = ("requests", "seed", "learner", "before", "after", "first request to swap")
    return table((*heads, "memory of the learner and its processes"), rows)


def states_compared() -> str:
    found = result("learn/states.json")
    rows = [
        (
            kind,
            _change(each["acceptance_change"]),
            *(
                f"{share['median']:.0%} ({share['low']:.0%} to {share['high']:.0%})"
                for share in (each["share_of_time_to_swap"], each["share_of_cycle_time"])
            ),
        )
        for kind, each in found["compared"].items()
    ]
    heads = ("requests", "acceptance after, ring relative to files (95% interval)")
    more = ("time to swap, of that from files (range)", "time of the cycle (range)")
    (seconds,) = {row["replay_states_seconds"] for rows in found["ring"].values() for row in rows}
    once = f"The states of replayed text were made once, before, in {seconds:.0f} s."
    return f"{table((*heads, *more), rows)}\n\n{once}"


def drift() -> str:
    found = result("learn/drift.json")
    with_it, without = (found["acceptance"][name] for name in ("with", "without"))
    verdicts = [each["verdict"] for each in found["learnt"]]
    swapped = [each["hour"] for each in found["events"] if each["event"] == "swapped"]
    rows = [
        ("requests, failed", f"{found['requests']}, {found['failed_requests']}"),
        ("acceptance length without a learner", interval(without)),
        ("with the learner", interval(with_it)),
        ("change", _change(found["change"])),
        ("change on the base sets at the end", _change(found["base_change"])),
        ("largest loss that the gate allows", f"{found['base_loss_bound']:.0%}"),
        (
            "cycles: published, rejected, undecided",
            ", ".join(str(verdicts.count(name)) for name in ("passed", "rejected", "undecided")),
        ),
        ("swaps, roll-backs", f"{found['swaps']}, {found['roll_backs']}"),
        ("swaps after hours", ", ".join(f"{hour:.1f}" for hour in swapped)),
    ]
    title = f"{found['stands_for_hours']:g} hours in {found['minutes']:.0f} minutes"
    return table((title, "measured"), rows)


def _change(found: Any) -> str:
    if found is None:
        return "not measured"
    low, high = _percent(found["low"]), _percent(found["high"])
    return f"{_percent(found['value'])} ({low} to {high})"


def _percent(share: float) -> str:
    return f"{share:+.1%}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
