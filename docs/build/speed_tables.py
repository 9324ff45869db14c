"""What `leadout tune` reports against what `leadout bench` measures, for every pair that ships."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from result_tables import BENCH, LIVE_BENCH, interval, result, speedup, table

# Tuned files, and benches that served with them.
PAIRS = {
    "SmolLM2": ("bench/smollm2-tuned.json", BENCH),
    "SmolLM2, run of live": ("bench/smollm2-tuned.json", LIVE_BENCH),
    "SmolLM2, quickstart": ("quickstart/tuned.json", "quickstart/bench.json"),
    "Qwen2.5-Coder-1.5B": (
        "bench/qwen2.5-coder-1.5b-tuned.json",
        "bench/qwen2.5-coder-1.5b.json",
    ),
}


@dataclass(frozen=True)
class Load:
    """A number of concurrent requests to a pair, with the K of the tuned file."""

    pair: str
    requests: int
    k: int
    tuned: dict[str, float]  # the value and its 95% interval
    computed: float  # from tune's costs and the bench's prompts and acceptance
    measured: dict[str, float]

    @property
    def is_contained(self) -> bool:
        return self.tuned["low"] <= self.measured["speedup"] <= self.tuned["high"]


def loads() -> list[Load]:
    """All loads that were tuned for and measured."""
    found = []
    for pair, (tuned_name, bench_name) in PAIRS.items():
        tuned, bench = result(tuned_name), result(bench_name)
        for mean in bench["geometric_means"]:
            requests = mean["concurrency"]
            if mean["arm"] == "tuned":
                k = _length_at(tuned, requests)
                predicted = tuned["speedup"][str(requests)][str(k)]
                found.append(Load(pair, requests, k, predicted, _computed(bench, requests), mean))
    return found


def _computed(bench: Any, requests: int) -> float:
    """The geometric mean over prompt sets, as that of what was measured."""
    logs = [
        math.log(cell["predicted_speedup"])
        for cell in bench["cells"]
        if (cell["arm"], cell["concurrency"]) == ("tuned", requests)
    ]
    return math.exp(sum(logs) / len(logs))


def tune_and_bench() -> str:
    rows = [
        (
            each.pair,
            each.requests,
            each.k,
            interval(each.tuned),
            f"{each.computed:.2f}",
            speedup(each.measured),
            "yes" if each.is_contained else "no",
        )
        for each in loads()
    ]
    heads = ("pair", "concurrent requests", "K", "`leadout tune`", "its costs, this load",
             "`leadout bench`", "within the interval of tune")  # fmt: skip
    return table(heads, rows)


def _length_at(tuned: Any, requests: int) -> int:
    (k,) = [k for first, last, k in tuned["table"] if first <= requests <= last]
    return int(k)
