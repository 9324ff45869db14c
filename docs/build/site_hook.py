"""What the built site adds to docs/: the help of every command, and linked files outside docs/.

A link to `../results/bench/smollm2.json` is right when the page is read in the repository. In the
built site that file is elsewhere, so it is copied and the link is rewritten.
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
    """The path from the repository's root, if the link of this page leaves docs/."""
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
        # As it is: a page of the site is made of docs/ only.
        content = (ROOT / path).read_bytes()
        files.append(File.generated(config, f"{COPIED}/{plain(path)}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = posixpath.dirname(page.file.src_uri)

    def rewrite(found: re.Match[str]) -> str:
        path = outside(page.file.src_uri, found[2])
        if path is None or not (ROOT / path).is_file():
            return found[0]  # mkdocs reports it, if it is dead
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
    """Under a name that a browser shows instead of rendering or running it."""
    return path if path.endswith((".html", ".json", ".svg", ".txt")) else f"{path}.txt"
