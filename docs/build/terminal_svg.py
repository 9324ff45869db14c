"""Render a terminal recording (asciicast v2) as an animated SVG without scripts.

    python docs/build/terminal_svg.py CAST SVG

Every piece of output is a group that CSS makes visible at its time, and the lines scroll by steps.
Without animation (librsvg, or a reader who prefers reduced motion) all of them are visible and
scrolled to the end: the last screen. Output can only append: a recording that moves the cursor is
refused, except for lines that one output writes several times. Pauses longer than the recording's
`idle_time_limit` are cut to it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.style import Style

COLUMN, LINE, FONT_SIZE = 8.4, 19, 14  # pixels
MARGIN, PADDING, TITLE_HEIGHT = 2, 14, 30
HOLD_SECONDS = 8.0  # for the last screen, before the recording starts again
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
BACKGROUND, BAR, BORDER, TEXT, SOFT = "#1e2530", "#2a3342", "#5b6675", "#d7dde6", "#8d99a8"
# ANSI colours 0 to 15; readable on the background.
COLOURS = (
    *("#8d99a8", "#f28b82", "#8ccf9a", "#e6c07b", "#7fb2f0", "#d19ad8", "#6cc7c7", "#d7dde6"),
    *("#8d99a8", "#f28b82", "#8ccf9a", "#e6c07b", "#7fb2f0", "#d19ad8", "#6cc7c7", "#ffffff"),
)
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")  # colours and weights
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class CastError(ValueError):
    """The recording cannot be rendered."""


@dataclass(frozen=True, slots=True)
class Recording:
    columns: int
    rows: int
    title: str
    events: tuple[tuple[float, str], ...]  # seconds, output


@dataclass(frozen=True, slots=True)
class Span:
    """Text of one style on one line, visible from a time on."""

    at: float
    row: int
    column: int
    text: str
    style: Style


def read_cast(text: str) -> Recording:
    """A recording with its pauses cut."""
    head, *lines = text.splitlines()
    header = json.loads(head)
    if header.get("version") != 2:
        raise CastError(f"expected asciicast version 2, got {header.get('version')}")
    limit = header.get("idle_time_limit", float("inf"))
    events, shown, before = [], 0.0, 0.0
    for line in lines:
        at, kind, output = json.loads(line)
        if kind != "o":
            continue
        shown += min(at - before, limit)
        before = at
        events.append((round(shown, 3), output))
    return Recording(header["width"], header["height"], header.get("title", ""), tuple(events))


def spans_of(recording: Recording) -> list[Span]:
    """What appears where and when."""
    screen, decoder, console = Screen(recording.columns), AnsiDecoder(), Console()
    for at, output in recording.events:
        lines = _without_overwritten(output)
        control = _CONTROL.search(_ESCAPE.sub("", "\n".join(lines)))
        if control is not None:
            raise CastError(
                f"the output at {at} s has the control character {control[0]!r}; record commands "
                "whose output only appends, without progress bars"
            )
        for number, line in enumerate(lines):
            if number:
                screen.end_line()
            for text, style, _ in decoder.decode_line(line).render(console, end=""):
                screen.write(at, text, style or Style.null())
    return screen.spans


def _without_overwritten(output: str) -> list[str]:
    """The lines of one output; of a line that was written several times, the last state."""
    first, *lines = output.replace("\r\n", "\n").split("\n")
    # The first line may continue an earlier output, unless it starts with a return itself.
    first = first.rpartition("\r")[2] if first.startswith("\r") else first
    return [first, *(line.rpartition("\r")[2] for line in lines)]


class Screen:
    """Where the next character goes; long lines are wrapped."""

    def __init__(self, columns: int) -> None:
        self.spans: list[Span] = []
        self._columns = columns
        self._row = self._column = 0

    def end_line(self) -> None:
        self._row, self._column = self._row + 1, 0

    def write(self, at: float, text: str, style: Style) -> None:
        while text:
            if self._column == self._columns:
                self.end_line()
            here = text[: self._columns - self._column]
            if here.strip():
                self.spans.append(Span(at, self._row, self._column, here, style))
            self._column += len(here)
            text = text[len(here) :]


def render(recording: Recording) -> str:
    spans = spans_of(recording)
    if not spans:
        raise CastError("the recording shows nothing")
    total = recording.events[-1][0] + HOLD_SECONDS
    width = round(recording.columns * COLUMN) + 2 * (PADDING + MARGIN)
    screen = recording.rows * LINE
    height = TITLE_HEIGHT + screen + 2 * (PADDING + MARGIN)
    times = sorted({span.at for span in spans})
    frames = [_appearance(number, at / total) for number, at in enumerate(times)]
    scroll, last = _scrolling(recording, spans, total)
    groups = [
        f'<g style="animation-name:t{number}">\n'
        + "".join(_drawn(span) for span in spans if span.at == at)
        + "</g>\n"
        for number, at in enumerate(times)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" xml:space="preserve" role="img" '
        f'aria-label="{escape(recording.title)}">\n'
        f"<title>{escape(recording.title)}</title>\n"
        "<style>\n"
        f"text {{ font-family: {FONT}; font-size: {FONT_SIZE}px; white-space: pre; }}\n"
        f"#lines, #lines g {{ animation: {total:.3f}s step-end infinite; }}\n"
        "#lines { animation-name: scroll; }\n"
        f"{scroll}{''.join(frames)}"
        "@media (prefers-reduced-motion: reduce) {\n"
        "  #lines, #lines g { animation: none !important; }\n"
        "}\n"
        "</style>\n"
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{width - 2 * MARGIN}" '
        f'height="{height - 2 * MARGIN}" rx="8" fill="{BACKGROUND}" stroke="{BORDER}"/>\n'
        f'<path d="M{MARGIN + 0.5} {MARGIN + TITLE_HEIGHT}v-22a7.5 7.5 0 0 1 7.5 -7.5'
        f'h{width - 2 * MARGIN - 16}a7.5 7.5 0 0 1 7.5 7.5v22z" fill="{BAR}"/>\n'
        f'<text x="{MARGIN + PADDING}" y="{MARGIN + 20}" style="font-size: 12px" fill="{SOFT}">'
        f"{escape(recording.title)}</text>\n"
        f'<svg x="{MARGIN + PADDING}" y="{MARGIN + TITLE_HEIGHT + PADDING}" '
        f'width="{width - 2 * (MARGIN + PADDING)}" height="{screen}">\n'
        f'<g id="lines" transform="translate(0 {-last})">\n{"".join(groups)}</g>\n'
        "</svg>\n</svg>\n"
    )


def _appearance(number: int, share: float) -> str:
    return f"@keyframes t{number} {{ 0% {{ opacity: 0 }} {share:.3%}, 100% {{ opacity: 1 }} }}\n"


def _scrolling(recording: Recording, spans: Iterable[Span], total: float) -> tuple[str, int]:
    """Steps of the animation, and how far up the lines are in the end."""
    steps, above = [(0.0, 0)], 0
    for span in spans:
        needed = max(0, span.row + 1 - recording.rows) * LINE
        if needed > above:
            above = needed
            steps.append((span.at / total, above))
    by_share = dict(steps)  # the last of those at the same time
    frames = "".join(
        f"  {share:.3%} {{ transform: translateY({-up}px) }}\n" for share, up in by_share.items()
    )
    end = f"  100% {{ transform: translateY({-above}px) }}\n"
    return f"@keyframes scroll {{\n{frames}{end}}}\n", above


def _drawn(span: Span) -> str:
    style = span.style
    fill = TEXT
    if style.color is not None and style.color.number is not None:
        fill = COLOURS[style.color.number] if style.color.number < len(COLOURS) else TEXT
    if style.dim:
        fill = SOFT
    weight = ' font-weight="bold"' if style.bold else ""
    slant = ' font-style="italic"' if style.italic else ""
    text = span.text.rstrip()
    left = len(text) - len(text.lstrip())
    x = (span.column + left) * COLUMN
    return (
        f'<text x="{x:g}" y="{span.row * LINE + FONT_SIZE}" fill="{fill}"{weight}{slant} '
        f'textLength="{(len(text) - left) * COLUMN:g}">{escape(text.strip(), quote=False)}</text>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cast", type=Path)
    parser.add_argument("svg", type=Path)
    arguments = parser.parse_args()
    arguments.svg.write_text(render(read_cast(arguments.cast.read_text())))


if __name__ == "__main__":
    main()
