"""Write the reference pages from the code: commands, files, Python API.

    python scripts/make_reference.py [--out docs/reference]

Commands are asked of typer. Files and the API are read from the source, which needs no import of
torch or vLLM. A test makes the pages again and compares.
"""

import argparse
import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from reference_contents import API, FILES

from leadout.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
MADE = "<!-- Made by scripts/make_reference.py; do not edit. -->"


# Commands.


def commands_page() -> str:
    group: Any = typer.main.get_command(app)
    lines = [
        f"# Commands\n\n{MADE}\n",
        "Every command has `--help`; those that report have `--json`.",
    ]
    for name, command in sorted(group.commands.items()):
        lines += list(_command(f"leadout {name}", command))
    return "\n".join(lines) + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"\n## {name}\n"
    yield inspect.cleandoc(command.help or "")
    if getattr(command, "commands", None):
        for sub, inner in sorted(command.commands.items()):
            yield from (
                line.replace("\n## ", "\n### ") for line in _command(f"{name} {sub}", inner)
            )
        return
    params = command.get_params(typer.Context(command))
    arguments = [each for each in params if each.param_type_name == "argument"]
    options = [each for each in params if each.param_type_name == "option"]
    yield "\n```console"
    words = " ".join(each.name.upper() for each in arguments)
    settings = command.context_settings
    extra = " [-- FLAGS OF VLLM]" if settings.get("allow_extra_args") else ""
    if settings.get("ignore_unknown_options"):
        extra = " [FLAGS OF VLLM]"
    yield f"{name} {words} [OPTIONS]{extra}".replace("  ", " ")
    yield "```"
    if arguments:
        yield "\n| argument | meaning |\n| --- | --- |"
        for each in arguments:
            yield f"| `{each.name.upper()}` | {_cell(each.help)} |"
    yield "\n| option | default | meaning |\n| --- | --- | --- |"
    for each in options:
        if each.name != "help":
            flags = " ".join(f"`{flag}`" for flag in [*each.opts, *each.secondary_opts])
            yield f"| {flags} | {_default(each)} | {_cell(each.help)} |"


def _default(option: Any) -> str:
    if option.required:
        return "required"
    value = getattr(option.default, "value", option.default)
    return "" if value in (None, False, (), []) else f"`{value}`"


# Files.


def files_page() -> str:
    lines = [f"# Files\n\n{MADE}\n"]
    lines += ["All of them refuse fields that they do not know, and say which."]
    for title, (meaning, models) in FILES.items():
        lines += [f"\n## {title}\n", meaning]
        for place, path in enumerate(models):
            lines += list(_model(path, is_inner=place > 0))
    return "\n".join(lines) + "\n"


def _model(path: str, *, is_inner: bool) -> Iterator[str]:
    module, _, name = path.partition(":")
    source = Source(module)
    definition = source.named(name)
    if is_inner:
        yield f"\n### {name}"
    text = ast.get_docstring(definition)
    if text:
        yield f"\n{' '.join(text.split())}"
    yield "\n| field | type | default | meaning |\n| --- | --- | --- | --- |"
    for field in _fields(definition):
        kind, default, meaning = _described(field, name, source)
        called = ast.unparse(field.target)
        yield f"| `{called}` | {_code(kind)} | {_code(default)} | {_cell(meaning)} |"


def _fields(definition: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign):
            yield statement


def _described(field: ast.AnnAssign, owner: str, source: "Source") -> tuple[str, str, str]:
    """Type, default and meaning; the meaning is the field's description or its comment."""
    kind: ast.expr = field.annotation
    details: list[ast.keyword] = []
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Annotated":
        kind, call = kind.slice.elts  # type: ignore[attr-defined]
        details = call.keywords
    value = field.value
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        details, value = [*details, *value.keywords], None
    words = {each.arg: each.value for each in details}
    value = words.get("default", value)
    meaning = ""
    if "description" in words:
        # From the model itself, as the text may be put together from constants.
        model = getattr(import_module(source.name), owner)
        meaning = model.model_fields[ast.unparse(field.target)].description
    meaning = meaning or source.comments.get(field.end_lineno or 0, "")
    return ast.unparse(kind), "" if value is None else ast.unparse(value), meaning


# The Python API.


def python_page() -> str:
    lines = [f"# Python API\n\n{MADE}\n"]
    lines += ["Modules that are meant to be imported. `leadout.dflash` needs torch only."]
    for module, title in API.items():
        source = Source(module)
        lines += [f"\n## {title}\n", f"`{module}`: {source.first_words}"]
        for home, name in source.public():
            lines += list(_member(home.named(name)))
    return "\n".join(lines) + "\n"


def _member(definition: Any) -> Iterator[str]:
    yield f"\n### {definition.name}\n"
    if isinstance(definition, ast.ClassDef):
        yield f"```python\n{_as_we_write(_class_line(definition))}\n```"
    else:
        yield f"```python\n{_as_we_write(_signature(definition))}\n```"
    text = ast.get_docstring(definition)
    if text:
        yield f"\n{text}"
    for inner in definition.body if isinstance(definition, ast.ClassDef) else []:
        if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
            told = ast.get_docstring(inner)
            meaning = f": {' '.join(told.split())}" if told else ""
            yield f"\n- `{_signature(inner, width=1000).removesuffix(': ...')}`{meaning}"


def _as_we_write(code: str) -> str:
    """With the quotes of our sources, which ast does not keep."""
    return code if '"' in code else code.replace("'", '"')


def _class_line(definition: ast.ClassDef) -> str:
    bases = ", ".join(ast.unparse(base) for base in definition.bases)
    lines = [f"class {definition.name}({bases}):" if bases else f"class {definition.name}:"]
    lines += [f"    {ast.unparse(field)}" for field in _fields(definition) if _is_public(field)]
    for inner in definition.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            lines += [""] if len(lines) > 1 else []
            lines.append(textwrap.indent(_signature(inner, width=92), "    "))
    return "\n".join(lines if len(lines) > 1 else [f"{lines[0]} ..."])


def _is_public(field: ast.AnnAssign) -> bool:
    return not ast.unparse(field.target).startswith("_")


def _signature(function: ast.FunctionDef, width: int = 96) -> str:
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    is_property = any(ast.unparse(each) == "property" for each in function.decorator_list)
    if is_property:
        return f"{function.name}{returns}"
    arguments = _split(ast.unparse(function.args))
    line = f"def {function.name}({', '.join(arguments)}){returns}: ..."
    if len(line) <= width:
        return line
    broken = "\n".join(f"    {part}," for part in arguments)
    return f"def {function.name}(\n{broken}\n){returns}: ..."


def _split(arguments: str) -> list[str]:
    """At the commas that are not inside brackets."""
    parts, depth = [""], 0
    for sign in arguments:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    # ast writes `count: int=1`; people write `count: int = 1`.
    return [re.sub(r"^([*\w]+: .+?)=", r"\1 = ", part.strip()) for part in parts]


class Source:
    """A module as it is written: definitions, docstrings and comments."""

    def __init__(self, module: str) -> None:
        self.name = module
        path = SOURCE / Path(*module.split("."))
        self._path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        text = self._path.read_text()
        self._tree = ast.parse(text)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        self.comments = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokens
            if token.type == tokenize.COMMENT and token.line.strip() != token.string
        }

    @property
    def first_words(self) -> str:
        return (ast.get_docstring(self._tree) or "").partition("\n\n")[0].replace("\n", " ")

    def named(self, name: str) -> Any:
        for statement in self._tree.body:
            if getattr(statement, "name", None) == name:
                return statement
        raise LookupError(f"{self._path}: found no {name}, wanted one; correct the table")

    def public(self) -> Iterator[tuple["Source", str]]:
        """Definitions without an underscore; of a package, those it hands on."""
        if self._path.name == "__init__.py":
            for statement in self._tree.body:
                if isinstance(statement, ast.ImportFrom) and statement.module:
                    home = Source(statement.module)
                    for alias in statement.names:
                        if home.defines(alias.name):
                            yield home, alias.name
            return
        for statement in self._tree.body:
            is_definition = isinstance(statement, ast.ClassDef | ast.FunctionDef)
            if is_definition and not statement.name.startswith("_"):
                yield self, statement.name

    def defines(self, name: str) -> bool:
        return any(getattr(statement, "name", None) == name for statement in self._tree.body)


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _code(text: str) -> str:
    """A bar would end the cell, and readers of Markdown disagree on how to escape it in code."""
    if "|" in text:
        return f"<code>{escape(text).replace('|', '&#124;')}</code>"
    return f"`{text}`" if text else ""


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "files.md": files_page,
    "python.md": python_page,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reference")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (out / name).write_text(page())
        print(f"wrote {out / name}")


if __name__ == "__main__":
    main()
