"""HTML pages as data: a `Page` of sections, rendered into one file that loads nothing.

Commands describe what their page contains; the template has the HTML and the style. Every text is
escaped by jinja2, and charts, the only markup that is passed through, come from matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal

from leadout.report.charts import Chart, inline

if TYPE_CHECKING:
    from jinja2 import Template

Tone = Literal["good", "warning", "bad", "note"]


@dataclass(frozen=True, slots=True)
class Text:
    kind: ClassVar[str] = "text"
    text: str
    soft: bool = False  # an explanation beside the result


@dataclass(frozen=True, slots=True)
class Command:
    kind: ClassVar[str] = "command"
    command: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Heading:
    """Of a part of a section."""

    kind: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True, slots=True)
class Drawing:
    kind: ClassVar[str] = "drawing"
    chart: Chart

    @property
    def svg(self) -> str:
        from markupsafe import Markup

        return Markup(inline(self.chart))


@dataclass(frozen=True, slots=True)
class Table:
    """The first columns are text, the others numbers; `tones` colour the first cell of each row."""

    kind: ClassVar[str] = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int
    tones: Sequence[Tone] = ()


@dataclass(frozen=True, slots=True)
class Folded:
    """Blocks that a reader opens with a click."""

    kind: ClassVar[str] = "folded"
    summary: str
    blocks: Sequence[Block]


Block = Text | Command | Heading | Drawing | Table | Folded


@dataclass(frozen=True, slots=True)
class Section:
    heading: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Verdict:
    tone: Tone
    sentences: Sequence[str]
    word: str = ""


@dataclass(frozen=True, slots=True)
class Card:
    """One of the few numbers that people look for first."""

    name: str
    number: str
    detail: str


@dataclass(frozen=True, slots=True)
class Page:
    command: str  # for the title: "check" of `leadout check`
    heading: str
    facts: Sequence[str]  # when, where and of what
    sections: Sequence[Section]
    verdict: Verdict | None = None
    cards: Sequence[Card] = field(default=())


def render(page: Page) -> str:
    """The page as the text of one HTML file, without scripts."""
    return f"{_template().render(page=page)}\n"


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("leadout.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=False,
    )
    return environment.get_template("page.html.j2")
