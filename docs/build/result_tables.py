"""Tables on speed, acceptance, faults, training and live control; see fill_docs.py."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOADS = ("1", "4", "8", "16")


def result(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text())


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


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
    bench = result("bench/smollm2.json")
    loads = sorted({mean["concurrency"] for mean in bench["geometric_means"]})
    rows = []
    for arm in dict.fromkeys(mean["arm"] for mean in bench["geometric_means"]):
        found = {m["concurrency"]: m for m in bench["geometric_means"] if m["arm"] == arm}
        rows.append([arm, *(_spread(found[load]["speedup_spread"]) for load in loads)])
    return table(["concurrent requests", *map(str, loads)], rows)


def bench_sets() -> str:
    cells = result("bench/smollm2.json")["cells"]
    loads = sorted({cell["concurrency"] for cell in cells})
    rows = []
    for name in sorted({cell["prompt_set"] for cell in cells}):
        found = {
            cell["concurrency"]: cell["speedup_spread"]
            for cell in cells
            if cell["prompt_set"] == name and cell["arm"] == "tuned"
        }
        rows.append([name, *(_spread(found[load]) for load in loads)])
    return table(["`tuned`, concurrent requests", *map(str, loads)], rows)


def bench_rounds() -> str:
    bench = result("bench/smollm2.json")
    rounds = bench["settings"]["rounds"]
    near = bench["prediction"]["within_15_percent"]
    return (
        f"Median of {rounds} rounds, with minimum and maximum in brackets. In {near:.0%} of "
        f"{bench['prediction']['cells']} cells the cost model of the tuned file, given the "
        "acceptance measured in the cell, predicts the speed-up to within 15%."
    )


def profile() -> str:
    by_load = result("bench/profile.json")["by_batch_size"]
    parts = by_load["1"]
    rows = [[part, *(f"{by_load[load][part]:.1f}" for load in by_load)] for part in parts]
    return table(["milliseconds, concurrent requests", *by_load], rows)


def overhead() -> str:
    ratios = result("serve/throughput.json")["ratios"]
    rows = [
        (
            name.removeprefix("concurrency "),
            f"{each['median']:.2f}",
            f"{each['lower_quartile']:.2f} to {each['upper_quartile']:.2f}",
            each["rounds"],
        )
        for name, each in ratios.items()
    ]
    return table(("concurrent requests", "Leadout / stock vLLM", "quartiles", "rounds"), rows)


def _ms(interval: Any) -> str:
    return f"{1000 * interval['value']:.1f} ms"


def _spread(spread: Any) -> str:
    return f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"


# Acceptance and correctness


def acceptance_sets() -> str:
    sets = result("train/smollm2.json")["acceptance"]
    best_first = sorted(sets.items(), key=lambda item: -item[1]["served"])
    rows = [
        (name, each["prompts"], f"{each['served']:.2f}", f"{each['predicted']:.2f}")
        for name, each in best_first
    ]
    return table(("prompt set", "prompts", "served", "predicted by validation"), rows)


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


def training() -> str:
    run = result("train/smollm2.json")
    kept, kills = result("train/memory.json")["states"], result("train/kill.json")
    text = result("data/kill.json")
    blocks = blocks_of(run)
    rows = [
        (
            "training text",
            f"{run['data_response_tokens']:,} tokens of {run['data_samples']:,} answers",
        ),
        ("training", f"{run['training_minutes']:.0f} minutes, {blocks:,} blocks"),
        (
            "peak memory; with ten times the data",
            f"{kept['disk']['small']['peak_mib']:.0f} MiB, "
            f"{kept['disk']['large']['peak_mib']:.0f} MiB (a tiny target)",
        ),
        (
            f"training killed {len(kills['kills'])} times and resumed",
            "largest difference in any weight: "
            f"{kills['largest_difference_in_best.safetensors']:g}",
        ),
        (
            f"data killed {len(text['kills'])} times and resumed",
            f"{text['samples']} samples, {text['missing']} missing, {text['different']} different",
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
    ratios = result("live/smollm2.json")["traffic"]["ratios"]
    arms = list(next(iter(ratios.values()))["to_each_arm_over_all"])
    rows = [
        [
            load,
            *(f"{each['to_each_arm_over_all'][arm]:.2f}" for arm in arms),
            f"{each['worst_phase']:.2f}",
        ]
        for load, each in ratios.items()
    ]
    heads = [f"over {arm}" for arm in arms]
    return table(["concurrent requests", *heads, "worst kind of text, over the best fixed K"], rows)


def live_useless() -> str:
    ratios = result("live/smollm2.json")["useless"]["ratios"]
    cells = [f"{ratio:.2f}" for ratio in ratios.values()]
    return table(["concurrent requests", *ratios], [["over bare vLLM", *cells]])
