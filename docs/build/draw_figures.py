"""Draw the figures of the documentation.

    python docs/build/draw_figures.py

Figures are charts of committed results and three diagrams. Tests draw them again and compare the
numbers, so that no figure can contradict the results.
"""

import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from leadout.report.charts import Point, Series, bars, dots, lines, picture

ROOT = Path(__file__).resolve().parents[2]
INK, SOFT = "#1c2330", "#5b6675"
BLUE, AMBER, TEAL, RED = "#2563eb", "#d97706", "#0d9488", "#b91c1c"
FONT = "system-ui, sans-serif"


def result(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text())


def acceptance() -> str:
    """Acceptance by position, for each prompt set."""
    sets = result("train/smollm2.json")["acceptance"]
    series = [
        Series(
            name,
            [
                Point(str(place + 1), share)
                for place, share in enumerate(sets[name]["served_by_position"])
            ],
        )
        for name in ("mbpp", "gsm8k", "humaneval", "mt_bench", "spec_bench")
    ]
    title = "Share of steps that accept all drafts up to a position"
    return picture([lines(series, title, "draft position", "share of steps")])


def break_even() -> str:
    """Speed-up by K at three batch sizes."""
    tuned = result("bench/smollm2-tuned.json")
    series = [
        Series(
            f"batch size {batch}",
            [
                Point(f"K = {k}", each["value"], each["low"], each["high"])
                for k, each in by_k.items()
            ],
        )
        for batch, by_k in tuned["speedup"].items()
        if batch in ("1", "4", "16")
    ]
    title = "Predicted speed-up over a bare engine, with 95% intervals"
    return picture([dots(series, title, "draft tokens per step", "speed-up")])


def exact() -> str:
    """Accepted and resampled tokens together follow the target's distribution."""
    words = ("the", "a", "this", "one")
    p, q = (0.50, 0.30, 0.15, 0.05), (0.70, 0.10, 0.15, 0.05)
    accepted = [min(pair) for pair in zip(p, q, strict=True)]
    residual = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    resampled = [(1 - sum(accepted)) * each / sum(residual) for each in residual]
    named = {
        "target p": p,
        "drafter q": q,
        "accepted, min(p, q)": accepted,
        "resampled": resampled,
        "sum": [a + b for a, b in zip(accepted, resampled, strict=True)],
    }
    series = [
        Series(name, [Point(word, value) for word, value in zip(words, values, strict=True)])
        for name, values in named.items()
    ]
    return picture([bars(series, "One draft at temperature 1")])


class Diagram:
    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title, self._marks = (width, height), title, list[str]()

    def box(
        self, x: float, y: float, w: float, text: str, colour: str = INK, h: float = 34
    ) -> None:
        shape = f'x="{x}" y="{y}" width="{w}" height="{h}" rx="5"'
        self._marks.append(f'<rect {shape} fill="{colour}" fill-opacity=".1" stroke="{colour}"/>')
        rows = text.split("\n")
        top = y + h / 2 + 4.5 - 8 * (len(rows) - 1)
        for number, row in enumerate(rows):
            self.text(x + w / 2, top + 16 * number, row)

    def text(
        self, x: float, y: float, text: str, colour: str = INK, anchor: str = "middle"
    ) -> None:
        where = f'x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}"'
        self._marks.append(f"<text {where}>{escape(text)}</text>")

    def arrow(self, *points: tuple[float, float], colour: str = SOFT) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        style = f'fill="none" stroke="{colour}" stroke-width="1.5" marker-end="url(#tip)"'
        self._marks.append(f'<polyline points="{path}" {style}/>')

    def __str__(self) -> str:
        width, height = self._size
        box = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        point = f'<path d="M0 0L8 4L0 8z" fill="{SOFT}"/>'
        size = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
        tip = f'<defs><marker id="tip" {size} orient="auto">{point}</marker></defs>'
        ground = '<rect width="100%" height="100%" rx="8" fill="#ffffff"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="{FONT}" font-size="13" '
            f'role="img" aria-label="{escape(self._title)}">{tip}{ground}'
            f"{''.join(self._marks)}</svg>\n"
        )


def step() -> str:
    """One step of speculative decoding."""
    drawing = Diagram(712, 236, "one step of speculative decoding")
    drawing.text(16, 34, "drafted", SOFT, "start")
    drawing.text(16, 106, "verified", SOFT, "start")
    drawing.text(16, 178, "output", SOFT, "start")
    drawing.box(96, 14, 88, "Paris")
    drawing.text(140, 66, "anchor", SOFT)
    drafts = ["is", "the", "city", "of", "light"]
    for place, word in enumerate(drafts):
        x = 196 + 100 * place
        drawing.box(x, 14, 88, word, BLUE)
        drawing.arrow((x + 44, 52), (x + 44, 82))
    for place, word in enumerate(("is", "the", "capital", "of", "love")):
        colour = TEAL if place < 2 else RED if place == 2 else SOFT
        drawing.box(196 + 100 * place, 86, 88, word, colour)
    drawing.text(140, 106, "one target step", INK)
    drawing.box(96, 158, 88, "Paris")
    for place, word in enumerate(("is", "the", "capital")):
        drawing.arrow((240 + 100 * place, 124), (240 + 100 * place, 154))
        drawing.box(196 + 100 * place, 158, 88, word, TEAL)
    drawing.text(496, 172, "two drafts accepted, one token", SOFT, "start")
    drawing.text(496, 189, "from the target: 3 in one step", SOFT, "start")
    drawing.text(
        96, 224, "What the target computed after the rejected draft is discarded.", SOFT, "start"
    )
    return str(drawing)


def block() -> str:
    """A DFlash drafter and its target."""
    drawing = Diagram(712, 356, "a DFlash drafter beside its target")
    drawing.text(110, 30, "target", SOFT)
    for place, layer in enumerate(("layer 27", "layer 20", "layer 14", "layer 8", "layer 1")):
        drawing.box(40, 44 + 46 * place, 140, layer)
        drawing.arrow((180, 61 + 46 * place), (216, 61 + 46 * place), (216, 153), (244, 153))
    drawing.text(110, 290, "committed text", SOFT)
    drawing.arrow((110, 276), (110, 262))
    drawing.box(248, 128, 96, "join, fc,\nnorm", AMBER, 50)
    drawing.text(296, 200, "context features", SOFT)
    drawing.arrow((344, 153), (404, 153))
    drawing.text(362, 226, "keys, values", SOFT)
    drawing.text(546, 30, "drafter", SOFT)
    drawing.box(408, 136, 280, "draft layer 2", BLUE)
    drawing.box(408, 182, 280, "draft layer 1", BLUE)
    drawing.arrow((548, 182), (548, 172))
    drawing.arrow((376, 153), (376, 199), (404, 199))
    drawing.box(408, 90, 280, "norm, the target's output head", AMBER)
    drawing.arrow((548, 136), (548, 126))
    for place in range(6):
        x = 408 + 47 * place
        drawing.box(x, 236, 44, "mask" if place else "token", SOFT if place else INK)
        drawing.arrow((x + 22, 236), (x + 22, 220))
        if place:
            drawing.box(x, 44, 44, f"t+{place}", TEAL)
            drawing.arrow((x + 22, 90), (x + 22, 80))
    drawing.text(
        690,
        292,
        "a block of B = 6 slots in one pass, with attention in both directions",
        SOFT,
        "end",
    )
    drawing.text(
        40, 326, "Blue and amber: the drafter; the output head is the target's own.", SOFT, "start"
    )
    drawing.text(
        40,
        344,
        "It reads what the target has already computed and changes nothing in it.",
        SOFT,
        "start",
    )
    return str(drawing)


def commands() -> str:
    """Commands, and the files between them."""
    drawing = Diagram(712, 250, "commands and files")
    top = [
        ("data", "your prompts"),
        ("train", "answers"),
        ("check", "drafter"),
        ("tune", "a checked pair"),
        ("serve", "K by load"),
    ]
    for place, (command, needs) in enumerate(top):
        x = 16 + 140 * place
        drawing.box(x, 60, 116, f"leadout {command}", BLUE)
        drawing.text(x + 58, 46, needs, SOFT)
        if place:
            drawing.arrow((x - 24, 77), (x - 4, 77))
    drawing.box(576, 140, 116, "leadout bench", BLUE)
    drawing.arrow((634, 94), (634, 136))
    drawing.text(634, 196, "measured speed", SOFT)
    drawing.box(296, 140, 256, "counters, gauges, captured token ids", TEAL)
    drawing.arrow((590, 94), (590, 120), (424, 120), (424, 136))
    drawing.box(156, 140, 116, "leadout learn", BLUE)
    drawing.arrow((296, 157), (276, 157))
    drawing.arrow((214, 140), (214, 98))
    drawing.text(156, 196, "the learning loop, through files", SOFT, "start")
    drawing.text(
        16, 232, "Each command reads and writes files, and each can be run alone.", SOFT, "start"
    )
    return str(drawing)


FIGURES: dict[str, Callable[[], str]] = {
    "step": step,
    "block": block,
    "commands": commands,
    "acceptance": acceptance,
    "break-even": break_even,
    "exact": exact,
}


def main() -> None:
    files = {f"docs/figures/{name}.svg": draw for name, draw in FIGURES.items()}
    for name, draw in files.items():
        (ROOT / name).write_text(draw())
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
