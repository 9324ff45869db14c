"""Adds to the built site the help of every command and the linked files outside docs/.

A link to `../results/bench/smollm2.json` is correct when the page is read in the repository. The
built site does not contain that file, so the file is copied and the link is rewritten.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

from leadout.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
COPIED = "repository"
COMMANDS = "<!-- commands -->"
_LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def outside(page: str, link: str) -> str | None:
    """The path from the repository's root if this link of the page leaves docs/, else None."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") else path


def on_files(files: Files, config: Any) -> Files:
    linked = set()
    for file in files.documentation_pages():
        text = _FENCE.sub("", Path(file.abs_src_path or "").read_text())
        for _, link in _LINK.findall(text):
            path = outside(file.src_uri, link)
            if path is not None and (ROOT / path).is_file():
                linked.add(path)
    for path in sorted(linked):
        # Copied unchanged: only files in docs/ become pages of the site.
        content = (ROOT / path).read_bytes()
        files.append(File.generated(config, f"{COPIED}/{plain(path)}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = posixpath.dirname(page.file.src_uri)

    def rewrite(found: re.Match[str]) -> str:
        path = outside(page.file.src_uri, found[2])
        if path is None or not (ROOT / path).is_file():
            return found[0]  # mkdocs reports a dead link
        return found[1] + posixpath.relpath(f"{COPIED}/{plain(path)}", here or ".")

    return _LINK.sub(rewrite, markdown.replace(COMMANDS, commands()))


def commands() -> str:
    """The help page of every command, as a terminal of 80 columns shows it."""
    group: Any = typer.main.get_command(app)
    parts = []
    for name, command in sorted(group.commands.items()):
        context = typer.Context(command, info_name=f"leadout {name}", terminal_width=80)
        parts.append(f"## leadout {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def plain(path: str) -> str:
    """A name that makes browsers show the file as text instead of rendering or downloading it."""
    return path if path.endswith((".html", ".json", ".svg", ".txt")) else f"{path}.txt"
