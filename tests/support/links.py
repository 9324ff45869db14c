"""Dead links in Markdown files and in a built site; links to other hosts are not followed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def dead_markdown_links(page: Path) -> Iterator[str]:
    """Relative links of a Markdown file that lead nowhere in the repository."""
    for link in _LINK.findall(_CODE.sub("", _FENCE.sub("", page.read_text()))):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = page.parent / unquote(parts.path) if parts.path else page
        has_anchor = not parts.fragment or parts.fragment in _anchors(target)
        if not target.exists() or not has_anchor:
            yield f"{page.name}: {link}"


def _anchors(page: Path) -> set[str]:
    """Of headings, as code hosts and mkdocs make them."""
    if page.suffix != ".md" or not page.exists():
        return set()
    headings = _HEADING.findall(_FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in headings}


class _Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attributes if value}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("img", "script", "iframe") and "src" in found:
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon"):
            self.loaded.append(found["href"])


def dead_site_links(site: Path) -> Iterator[str]:
    """Links of built pages that lead nowhere, and whatever a page would load from elsewhere."""
    pages = {path.resolve(): _Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    yield f"{path.relative_to(site.resolve())}: loads {link}"
                continue
            start = site if parts.path.startswith("/") else path.parent
            way = unquote(parts.path).lstrip("/")
            target = (start / way).resolve() if way else path
            has_anchor = not parts.fragment or (
                target in pages and unquote(parts.fragment) in pages[target].ids
            )
            if not target.exists() or not has_anchor:
                yield f"{path.relative_to(site.resolve())}: {link}"
