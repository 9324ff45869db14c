"""Tables on Qwen2.5-Coder-1.5B: speed of its drafter over bare vLLM, acceptance and training."""

from __future__ import annotations

from typing import Any

from result_tables import blocks_of, result, table

BENCH = "bench/qwen2.5-coder-1.5b.json"
TRAINING = "train/qwen2.5-coder-1.5b.json"


def best_mean(load: int) -> dict[str, Any]:
    """The way of drafting that is fastest at a load, over all prompt sets."""
    found: list[dict[str, Any]] = [
        mean for mean in result(BENCH)["geometric_means"] if mean["concurrency"] == load
    ]
    return max(found, key=lambda mean: mean["speedup"])


def bench() -> str:
    """One row for each way of drafting and prompt set, and each comparison of bare with itself."""
    found = result(BENCH)
    loads = sorted({mean["concurrency"] for mean in found["geometric_means"]})
    rows = []
    for arm in dict.fromkeys(mean["arm"] for mean in found["geometric_means"]):
        cells = [cell for cell in found["cells"] if cell["arm"] == arm]
        for name in dict.fromkeys(cell["prompt_set"] for cell in cells):
            by_load = {c["concurrency"]: c for c in cells if c["prompt_set"] == name}
            rows.append([arm, name, *(_speedup(by_load.get(load)) for load in loads)])
        means = {m["concurrency"]: m for m in found["geometric_means"] if m["arm"] == arm}
        rows.append([arm, "mean", *(_speedup(means.get(load)) for load in loads)])
    for against in dict.fromkeys(each["against"] for each in found["bare_against_bare"]):
        same = {
            each["concurrency"]: {**each, "speedup": each["ratio"]}
            for each in found["bare_against_bare"]
            if each["against"] == against
        }
        rows.append(["bare again (A/A)", "mean", *(_speedup(same.get(load)) for load in loads)])
    return table(["", "concurrent requests", *map(str, loads)], rows)


def bench_rounds() -> str:
    found = result(BENCH)
    settings = next(iter(found["settings"].values()))
    return (
        f"Output tokens per second over bare vLLM: {settings['rounds']} rounds, in which every "
        f"server runs for {settings['seconds']:g} s, with the 95% interval in brackets; greedy "
        f"answers of {settings['output_tokens']} tokens."
    )


def acceptance() -> str:
    """By prompt set, the best first."""
    sets = result(TRAINING)["acceptance"]
    rows = [
        (name, each["prompts"], f"{each['served']:.2f}", f"{each['predicted']:.2f}")
        for name, each in sorted(sets.items(), key=lambda item: -item[1]["served"])
    ]
    return table(("prompt set", "prompts", "served", "validation, same texts"), rows)


def training() -> str:
    """Text, time and the curve on held-out answers."""
    found = result(TRAINING)
    (run,) = found["runs"]
    curve = ", ".join(
        f"{point['acceptance_length']:.2f} after {point['minutes']:.0f} minutes"
        for point in run["held_out_curve"]
    )
    rows = [
        (
            "training text",
            f"{found['data_response_tokens']:,} tokens of {found['data_samples']:,} answers",
        ),
        ("training", f"{found['training_minutes']:.0f} minutes, {blocks_of(found):,} blocks"),
        ("acceptance length on held-out answers", curve),
    ]
    return table(("", "measured"), rows)


def _speedup(cell: Any) -> str:
    if cell is None:
        return ""
    return f"{cell['speedup']:.2f} ({cell['low']:.2f} to {cell['high']:.2f})"
