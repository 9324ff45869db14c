"""Reads HTML and SVG as a browser would, for tests of reports."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta"}
HOSTILE = "<script>alert('x')</script>\"'&<img src=x onerror=y>"


class Reader(HTMLParser):
    """Collects text, tags and attributes, and requires that every tag is closed in its turn."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_loads_nothing(content: str) -> None:
    """No script, no address and no attribute that names a resource outside the page."""
    read = Reader(content)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(read.tags)
    names = {name for name, _ in read.attributes}
    assert not {"src", "href", "srcset", "action"} & names
    assert not any(name.startswith("on") for name in names)
    for name, value in read.attributes:
        if name == "xlink:href":
            assert str(value).startswith("#"), value  # a marker that the chart itself defines
    for reference in ("http:", "https:", "url(", "@import", "//"):
        assert reference not in content, reference


def assert_hostile_text_is_escaped(content: str) -> None:
    """On a page made from `HOSTILE` texts."""
    read = Reader(content)
    assert not {"script", "img"} & set(read.tags)
    assert "onerror" not in {name for name, _ in read.attributes}
    assert HOSTILE in read.text
