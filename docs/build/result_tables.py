"""Tables on speed, acceptance, faults, training and live control; see fill_docs.py."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from leadout.stats import Ratio, paired_ratio

ROOT = Path(__file__).resolve().parents[2]
LOADS = ("1", "4", "8", "16")
BENCH = "bench/smollm2.json"
# Measured again after a correction of live control, with `tuned` beside it.
LIVE_BENCH = "bench/smollm2-live.json"


def result(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text())


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def interval(found: Any, value: str = "value", digits: int = 2) -> str:
    """A value with the ends of its 95% interval, which few rounds do not have."""
    if found["low"] is None:
        return f"{found[value]:.{digits}f} (no interval)"
    shown, low, high = (f"{found[name]:.{digits}f}" for name in (value, "low", "high"))
    return f"{shown} ({low} to {high})"


def speedup(cell: Any) -> str:
    return interval(cell, "speedup")


def same_again(cell: Any) -> str:
    return interval(cell, "ratio", digits=3)


# Speed


def step_costs() -> str:
    tuned = result("bench/smollm2-tuned.json")
    rows = [
        (
            load,
            _ms(tuned["verify"][load]["0"]),
            _ms(tuned["verify"][load]["5"]),
            _ms(tuned["draft"][load]["5"]),
        )
        for load in LOADS
    ]
    heads = ("concurrent requests", "target step without drafts")
    return table([*heads, "the same step verifying 5 drafts per request", "drafting"], rows)


def break_even() -> str:
    tuned = result("bench/smollm2-tuned.json")
    length = tuned["acceptance"]["tokens"]["5"]["value"]
    rows = []
    for load in LOADS:
        bare = tuned["verify"][load]["0"]["value"]
        step = tuned["verify"][load]["5"]["value"] + tuned["draft"][load]["5"]["value"]
        drafting = f"{1000 * step:.1f} ms"
        rows.append(
            (
                load,
                f"{1000 * bare:.1f} ms",
                drafting,
                f"{step / bare:.2f}",
                f"{length:.2f}",
                f"{length * bare / step:.2f}",
            )
        )
    heads = ("concurrent requests", "bare step", "step with K = 5", "break-even AL")
    return table([*heads, "AL with K = 5", "predicted speed-up"], rows)


def tuned_table() -> str:
    ranges = result("bench/smollm2-tuned.json")["table"]
    rows = [(f"{a} to {b}" if a < b else a, k) for a, b, k in ranges]
    return table(("concurrent requests", "K"), rows)


def bench_means() -> str:
    """Both runs: fixed lengths and `tuned`; `live`, with a `tuned` of its own."""
    rows = []
    for name, label in ((BENCH, ""), (LIVE_BENCH, ", in the run of live")):
        bench = result(name)
        for arm in dict.fromkeys(mean["arm"] for mean in bench["geometric_means"]):
            if name == LIVE_BENCH or arm != "live":
                means = [mean for mean in bench["geometric_means"] if mean["arm"] == arm]
                rows.append([arm if arm == "live" else f"{arm}{label}", *map(speedup, means)])
        again = map(same_again, bench["bare_against_bare"])
        rows.append([f"bare vLLM again (A/A){label}", *again])
    return table(["concurrent requests", *LOADS], rows)


def live_mean(load: int, name: str = LIVE_BENCH) -> Any:
    """The speed-up of `live` over all prompt sets."""
    means = result(name)["geometric_means"]
    return next(each for each in means if (each["arm"], each["concurrency"]) == ("live", load))


def live_before() -> str:
    """What the run with fixed lengths had measured."""
    return (
        f"The run with fixed lengths had measured {speedup(live_mean(1, BENCH))} for `live` at 1 "
        f"request and {speedup(live_mean(16, BENCH))} at 16, with a fault that was corrected "
        "before the run of `live`: prompts in a step made it draft more than pays "
        "([what was wrong](decisions.md))."
    )


def bench_aa() -> str:
    rows = [
        (
            cell["concurrency"],
            same_again(cell),
            interval(cell["processor_ratio"], digits=3),
            cell["pairs"],
        )
        for cell in result("bench/aa.json")["cells"]
    ]
    heads = ("concurrent requests", "A/A by the clock", "by processor seconds", "pairs")
    return table(heads, rows)


def bench_method() -> str:
    rows = [
        (
            cell["turns"],
            cell["concurrency"],
            f"{cell['clock']['deviation_of_log_ratio']:.3f}",
            f"{cell['processor']['deviation_of_log_ratio']:.3f}",
            f"±{100 * cell['clock']['half_width_after_10_minutes']:.1f}%",
        )
        for cell in result("bench/method.json")["cells"]
    ]
    heads = ("turns", "concurrent requests", "deviation of a log ratio", "by processor seconds",
             "half interval after 10 minutes")  # fmt: skip
    return table(heads, rows)


def bench_sets() -> str:
    cells = result(BENCH)["cells"]
    loads = sorted({cell["concurrency"] for cell in cells})
    rows = []
    for name in sorted({cell["prompt_set"] for cell in cells}):
        found = {
            cell["concurrency"]: cell
            for cell in cells
            if cell["prompt_set"] == name and cell["arm"] == "tuned"
        }
        rows.append([name, *(speedup(found[load]) for load in loads)])
    return table(["`tuned`, concurrent requests", *map(str, loads)], rows)


def bench_rounds() -> str:
    bench = result(BENCH)
    settings, prediction = bench["settings"], bench["prediction"]
    return (
        "`live` was measured in a separate run, with its own servers of bare vLLM and `tuned`. "
        f"Values are geometric means over {len(settings['prompts'])} prompt sets and "
        f"{settings['rounds']} rounds, in which every server runs for {settings['seconds']:g} s, "
        f"with 95% intervals in brackets. Every answer has {settings['output_tokens']} tokens, "
        "even if the text ends earlier. A/A is the speed of a second server of bare vLLM over that "
        "of the first: the error of the method. "
        f"In {prediction['within_15_percent']:.0%} of {prediction['cells']} cells the cost "
        "model of the tuned file, given the acceptance measured in the cell, predicts the "
        "speed-up to within 15%."
    )


def profile(name: str = "bench/profile.json") -> str:
    by_load = result(name)["by_batch_size"]
    parts = by_load["1"]
    rows = [[part, *(f"{by_load[load][part]:.1f}" for load in by_load)] for part in parts]
    return table(["milliseconds, concurrent requests", *by_load], rows)


def overhead() -> str:
    ratios = result("serve/throughput.json")["ratios"]
    rows = [
        (
            name.removeprefix("concurrency "),
            interval(each, digits=3),
            each["pairs"],
        )
        for name, each in ratios.items()
    ]
    return table(("concurrent requests", "Leadout / stock vLLM (95% interval)", "rounds"), rows)


def _ms(interval: Any) -> str:
    return f"{1000 * interval['value']:.1f} ms"


# Acceptance and correctness


def acceptance_sets(name: str = "train/smollm2.json") -> str:
    """By prompt set, the best first, with intervals over texts."""
    found = result(name)
    rows = []
    for name, each in sorted(found["acceptance"].items(), key=lambda item: -item[1]["served"]):
        over_texts = each["predicted_interval"]
        computed = f"{each['predicted']:.2f} ({over_texts['low']:.2f} to {over_texts['high']:.2f})"
        rows.append((name, each["prompts"], f"{each['served']:.2f}", computed))
    sets = table(("prompt set", "prompts", "served", "validation, same texts"), rows)
    ahead = found["ahead"]
    return (
        f"{sets}\n\nA prediction, as means over the sets: {ahead['predicted']:.2f} computed on "
        f"every second text, {ahead['served']:.2f} served on the others, "
        f"{ahead['difference']:.1%} apart."
    )


def lossless() -> str:
    rows = [
        (
            "drafts never accepted" if arm["drafter"] == "random" else "drafts always accepted",
            arm["batch_size"],
            f"{arm['acceptance_length']:.2f}",
            f"{arm['equal_texts']} of {arm['prompts']}",
        )
        for arm in result("lossless/smollm2.json")["arms"]
    ]
    return table(("drafter", "batch", "acceptance length", "equal texts"), rows)


def faults() -> str:
    rows = result("faults/tiny.json")["faults"]
    stock = Counter(row["stock"].partition(":")[0] for row in rows)
    ours = Counter(row["leadout"].partition(":")[0] for row in rows)
    names = dict.fromkeys([*sorted(stock, key=lambda name: -stock[name]), *sorted(ours)])
    return table(
        (f"of {len(rows)} faults", "stock vLLM", "with Leadout"),
        [(name, stock[name], ours[name]) for name in names],
    )


def fault_rows() -> str:
    rows = [
        [row[name].replace("|", "\\|").replace("\n", " ") for name in ("fault", "stock", "leadout")]
        for row in result("faults/tiny.json")["faults"]
    ]
    return table(("fault", "stock vLLM 0.32", "with Leadout"), rows)


def check_faults() -> str:
    """Every seeded fault, and the healthy variants."""
    found = result("check/faults.json")
    whole = found["healthy_acceptance"]
    rows = []
    for fault in found["faults"]:
        length, repaired = fault["acceptance"], fault["repaired"]
        cost = "does not start" if length is None else f"{length:.2f} ({fault['effect']:+.1%})"
        back = "" if repaired is None else f"{repaired:.2f} ({repaired / whole:.0%})"
        rows.append((fault["name"], cost, fault["named"][0] if fault["named"] else "nothing", back))
    names = ", ".join(each["name"] for each in found["healthy"])
    summary = found["summary"]
    faults = table(("fault", "acceptance length", "first finding", "after the repair"), rows)
    return (
        f"Without a fault the acceptance length on these prompts is {whole:.2f}.\n\n{faults}\n\n"
        f"Healthy variants, none of which may be reported as faulty: {names}. "
        f"False alarms: {summary['false_alarms']} of {summary['healthy']}."
    )


def training() -> str:
    run = result("train/smollm2.json")
    memory, kills = result("train/memory.json"), result("train/kill.json")
    ranks = result("train/kill_ranks.json")
    kept = memory["states"]
    text, servers = result("data/kill.json"), result("data/endpoints.json")
    speed = result("train/speed.json")["cases"]
    blocks = blocks_of(run)
    rows = [
        (
            "training text",
            f"{run['data_response_tokens']:,} tokens of {run['data_samples']:,} answers",
        ),
        ("training", f"{run['training_minutes']:.0f} minutes, {blocks:,} blocks"),
        (
            "blocks per second on a processor without bfloat16 instructions, over the version that "
            "computed in bfloat16 there",
            ", ".join(
                f"{case['times_the_blocks_per_second']:.1f} times ({name})"
                for name, case in speed.items()
            ),
        ),
        (
            "peak memory; with ten times the data",
            f"{kept['disk']['small']['peak_mib']:.0f} MiB, "
            f"{kept['disk']['large']['peak_mib']:.0f} MiB (a tiny target)",
        ),
        *(
            (
                f"peak memory for {name}, target in the trainer; with served states",
                f"{each['compute']['peak_mib']:,.0f} MiB, {each['served']['peak_mib']:,.0f} MiB "
                f"(weights {each['weights_mib']:,.0f} MiB, of which embedding and head "
                f"{each['embedding_and_head_mib']:,.0f} MiB)",
            )
            for name, each in memory["targets"].items()
        ),
        (
            f"training killed {len(kills['kills'])} times and resumed",
            "largest difference in any weight: "
            f"{kills['largest_difference_in_best.safetensors']:g}",
        ),
        (
            f"sharded training killed {len(ranks['kills'])} times, resumed on 1 and 2 processes in "
            "turn",
            "weights differ by at most "
            f"{ranks['largest_share_of_movement']:.1e} of how far training moved them",
        ),
        (
            f"data killed {len(text['kills'])} times and resumed",
            f"{text['samples']} samples, {text['missing']} missing, {text['different']} different",
        ),
        (
            "data from two servers, one killed, one paused for a minute",
            f"{servers['samples']} samples, {servers['missing']} missing, "
            f"{servers['different']} different",
        ),
    ]
    return table(("", "measured"), rows)


def blocks_of(run: Any) -> int:
    return sum(
        max(point["step"] for point in part["held_out_curve"])
        * part["settings"]["batch_sequences"]
        * part["settings"]["anchors"]
        for part in run["runs"]
    )


def control() -> str:
    simulated = result("control/simulator.json")
    rows = [
        (
            name,
            f"{part['at_least_bound']} of {part['cells']}",
            f"{part['mean']:.3f}",
            f"{part['worst']['of_oracle']:.3f}",
        )
        for name, part in (
            ("traffic used to choose the constants", simulated["chosen_on"]),
            ("held-out traffic", simulated["held_out"]),
        )
    ]
    heads = ("simulated", f"cells with at least {simulated['bound']} of the oracle")
    return table([*heads, "mean", "worst"], rows)


def live() -> str:
    """Live control over the faster of bare vLLM and `tuned`, for each prompt set and load."""
    cells: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(dict)
    for cell in result(LIVE_BENCH)["cells"]:
        rates = [each["tokens_per_second"] for each in cell["rounds"]]
        cells[cell["prompt_set"], cell["concurrency"]][cell["arm"]] = rates
    loads = sorted({load for _, load in cells})
    rows = [
        [name, *(_over_best_other(cells[name, load]) for load in loads)]
        for name in sorted({name for name, _ in cells})
    ]
    return table(["`live`, concurrent requests", *map(str, loads)], rows)


def _over_best_other(rates: dict[str, list[float]]) -> str:
    def over(arm: str) -> Ratio:
        return paired_ratio([[a / b for a, b in zip(rates["live"], rates[arm], strict=True)]])

    others = {arm: over(arm) for arm in rates if arm not in ("live", "bare-again")}
    best, found = min(others.items(), key=lambda each: each[1].value)
    return f"{found} of {best}"


def prompt_lookup() -> str:
    ratios = result("live/prompt_lookup.json")["ratio"]
    rows = [[name, Ratio.model_validate(ratios[name])] for name in sorted(ratios)]
    return table(("kind of text", "with prompt lookup over without it"), rows)


def live_useless() -> str:
    cells = result("live/useless.json")["cells"]
    rows = [
        (label, *(with_interval(cell, key) for cell in cells))
        for label, key in (
            ("live control over bare vLLM", ""),
            ("without prompt lookup", "without_prompt_lookup"),
            ("bare vLLM against itself", "bare_against_bare"),
        )
    ]
    return table(["concurrent requests", *(cell["concurrency"] for cell in cells)], rows)


def with_interval(cell: dict[str, Any], key: str) -> str:
    value, prefix = cell[key or "ratio"], f"{key}_" if key else ""
    return f"{value:.2f} ({cell[prefix + 'low']:.2f} to {cell[prefix + 'high']:.2f})"
