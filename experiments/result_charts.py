"""Draw the charts and pages next to committed results from their JSON files.

    python experiments/result_charts.py

Experiments draw their own charts; this script draws all of them again after a change of the style.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from leadout.bench import page as bench_page
from leadout.bench.results import BenchResult
from leadout.report.charts import Chart, Point, Series, lines, picture

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


def drift(result: dict[str, Any]) -> str:
    """Acceptance length over drifting traffic with and without a learner; kinds; versions."""
    slices, events = result["slices"], result["events"]

    def series(name: str, value: Callable[[dict[str, Any]], float]) -> Series:
        return Series(name, [Point(f"{each['hour']:.1f}", value(each)) for each in slices])

    def share(kind: str) -> Callable[[dict[str, Any]], float]:
        return lambda each: each["requests"].get(kind, 0) / sum(each["requests"].values())

    def until(event: str) -> Callable[[dict[str, Any]], float]:
        return lambda each: sum(
            one["event"] == event and one["hour"] <= each["hour"] for one in events
        )

    hours = f"hours, simulated in {result['minutes']:.0f} minutes"
    kinds = dict.fromkeys(kind for each in slices for kind in each["requests"])
    return picture(
        [
            lines(
                [
                    series("with the learner", lambda each: each["with"]),
                    series("without it", lambda each: each["without"]),
                ],
                "Acceptance length as served, over drifting traffic",
                hours,
                "tokens per step",
            ),
            lines(
                [series(kind, share(kind)) for kind in kinds], "Kinds of requests", hours, "share"
            ),
            lines(
                [
                    series("swaps", until("swapped")),
                    series("roll-backs", until("rolled_back")),
                ],
                "Versions until then",
                hours,
                "number",
            ),
        ]
    )


def learn_picture(result: dict[str, Any]) -> str:
    """Tokens per second of a server before, during and after a learner's work."""
    speeds, swapped = result["tokens_per_second"], result["swapped"]
    learning = (result["learner_started"], result["learner_ended"])
    phases = {"before": (0.0, learning[0]), "after": (learning[1], result["seconds"])}

    def draw(axes: Any) -> None:
        minutes = [each["second"] / 60 for each in result["slices"]]
        values = [each["speed"] for each in result["slices"]]
        highest = 1.3 * max(values)
        axes.axvspan(*(at / 60 for at in learning), color="#5b6675", alpha=0.12, linewidth=0)
        axes.axvline(swapped / 60, color="#be185d", linewidth=1.4)
        axes.plot(minutes, values, color="#2563eb", linewidth=1.6)
        for phase, span in phases.items():
            low, value, high = (speeds[phase][each] for each in ("low", "value", "high"))
            axes.plot([at / 60 for at in span], [value, value], color="#d97706", linewidth=1.6)
            text = f"{value:.0f} ({low:.0f} to {high:.0f})"
            below = min(values) - 0.05 * highest  # where no curve is
            axes.text(sum(span) / 120, below, text, ha="center", va="top", fontsize=8)
        top = 0.96 * highest
        beside = 0.006 * result["seconds"] / 60
        axes.text(
            learning[0] / 60 + beside,
            top,
            "leadout learn on the same machine",
            va="top",
            fontsize=8,
        )
        axes.text(
            swapped / 60,
            0.88 * highest,
            "drafter swapped ",
            ha="right",
            va="top",
            fontsize=8,
        )
        axes.set(xlabel="minutes", ylabel="tokens per second", ylim=(0, highest))
        axes.set_xlim(0, result["seconds"] / 60)
        axes.grid(axis="y")

    ratio = result["ratio"]
    numbers = [
        *(f"{phase}: {Point('mean', **speeds[phase])}" for phase in phases),
        str(Point("after over before", ratio["value"], ratio["low"], ratio["high"])),
        *(f"{each['second']:.0f} s: {each['speed']:.1f}" for each in result["slices"]),
    ]
    title = f"Output tokens per second of one server, {result['clients']} requests at a time"
    return picture([Chart(title, 3.0, numbers, [], draw)])


def _drawn(draw: Callable[[dict[str, Any]], str], name: str) -> str:
    return draw(json.loads((RESULTS / name).read_text()))


def _bench(draw: Callable[[BenchResult], str], name: str) -> str:
    return draw(BenchResult.model_validate_json((RESULTS / "bench" / name).read_text()))


FILES: dict[str, Callable[[], str]] = {
    "results/bench/smollm2.svg": partial(_bench, bench_page.picture, "smollm2.json"),
    "results/bench/smollm2.html": partial(_bench, bench_page.page, "smollm2.json"),
    "results/learn/drift.svg": partial(_drawn, drift, "learn/drift.json"),
}


if (RESULTS / "learn" / "picture.json").exists():
    FILES["results/learn/picture.svg"] = partial(_drawn, learn_picture, "learn/picture.json")


def main() -> None:
    for name, draw in FILES.items():
        (ROOT / name).write_text(draw())
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
