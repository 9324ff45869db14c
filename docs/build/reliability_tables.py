"""The table of fault classes, and the commands that made it; see fill_docs.py."""

import shlex
from collections.abc import Sequence

from result_tables import result, table

FOLDER = "reliability"
WIDTH = 100  # columns of a command, after which it continues on the next line


def classes() -> str:
    rows = [
        (
            f"{each['name'][:1].upper()}{each['name'][1:]}",
            f"{each['cases']:,}",
            f"{each['lost']:,}",
            f"[{each['result']}]({{root}}results/{FOLDER}/{each['result']})",
        )
        for each in result(f"{FOLDER}/faults.json")["classes"]
    ]
    return table(("faults", "cases", "lost", "file"), rows)


def commands() -> str:
    """The command of each file of the table, with the sizes that it was run with."""
    names = dict.fromkeys(each["result"] for each in result(f"{FOLDER}/faults.json")["classes"])
    made = (result(f"{FOLDER}/{name}")["provenance"]["command"] for name in names)
    lines = "\n".join(wrapped(shlex.split(command)) for command in dict.fromkeys(made))
    return f"```console\n{lines}\n```"


def wrapped(words: Sequence[str]) -> str:
    """A command that can be copied, on as many lines as it needs; flags stay with their values."""
    parts: list[str] = []
    for before, word in zip(["", *words], map(shlex.quote, words), strict=False):
        if before.startswith("--") and not word.startswith("-"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = parts[:1]
    for part in parts[1:]:
        if len(f"{lines[-1]} {part} \\") > WIDTH:
            lines[-1] += " \\"
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}"
    return "\n".join(lines)
