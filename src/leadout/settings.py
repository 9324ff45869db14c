"""One settings model per command: flag, YAML key, default, bounds and help text in one place.

A command's settings are a frozen pydantic model that derives from `Settings`. Its fields are made
with `setting`; `cli/options.py` turns each into a flag or an argument. Python callers construct
the model directly.
"""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leadout.errors import LeadoutError, shortened
from leadout.files import read_text, write_text


class SettingsError(LeadoutError):
    """A setting that cannot be used: names the flag or key, the value and what was expected."""


def setting(
    default: Any,
    text: str,
    *,
    panel: str | None = None,
    metavar: str | None = None,
    flag: str | None = None,
    **bounds: Any,
) -> Any:
    """A field of a settings model; `text` is its help.

    `...` as the default makes it required. `panel` is its group in `--help`; the panel
    "argument" makes it a positional argument. `flag` overrides the name of the flag, which
    otherwise is that of the field. `bounds` are pydantic's: ge, gt, le, lt.
    """
    extra: dict[str, Any] = {"panel": panel, "metavar": metavar, "flag": flag}
    return Field(default, description=text, json_schema_extra=extra, **bounds)


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    command: ClassVar[str]  # for messages: "train" in `leadout train --help`

    @classmethod
    def resolve(cls, flags: dict[str, Any], file: Path | None = None) -> Self:
        """Flags override the YAML file, the file overrides the defaults; None is "not given"."""
        given = {name: value for name, value in flags.items() if value is not None}
        values = read_yaml(file) if file is not None else {}
        try:
            return cls.model_validate(values | given)
        except ValidationError as problem:
            raise SettingsError(cls._explain(problem, given, file)) from None

    @classmethod
    def _explain(cls, problem: ValidationError, given: dict[str, Any], file: Path | None) -> str:
        first = problem.errors()[0]
        hint = f"See `leadout {cls.command} --help`."
        if not first["loc"]:  # a validator over several settings says it all
            return f"{str(first['msg']).removeprefix('Value error, ')} {hint}"
        name = shortened(str(first["loc"][0]))
        in_file = file is not None and name not in given
        where = f"{file}: {name}" if in_file else cls.flag_of(name)
        if first["type"] == "missing":
            return f"{where} is required. {hint}"
        if first["type"] == "extra_forbidden":
            return f"{where} is not a setting of `leadout {cls.command}`. {hint}"
        expected = first["msg"][0].lower() + first["msg"][1:]
        return f"{where}: got {_shown(first['input'])}; {expected}. {hint}"

    @classmethod
    def flag_of(cls, name: str) -> str:
        """How a user writes a field: its flag, or the name of its argument."""
        extra = cls._extra(name)
        if extra.get("panel") == "argument":
            return name.upper()
        return str(extra.get("flag") or f"--{name.replace('_', '-')}")

    @classmethod
    def flags(cls) -> list[str]:
        """All flags and arguments, as a user writes them."""
        names = (name for name in cls.model_fields if cls._extra(name).get("panel") != "hidden")
        return [cls.flag_of(name) for name in names]

    @classmethod
    def _extra(cls, name: str) -> dict[str, Any]:
        field = cls.model_fields.get(name)
        extra = field.json_schema_extra if field is not None else None
        return extra if isinstance(extra, dict) else {}

    def write(self, path: Path) -> None:
        """As a YAML file from which `resolve` makes the same settings."""
        import yaml

        write_text(path, yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False))


_MAX_FLOW_DEPTH = 16
_BRACKET = re.compile(r"[\[\]{}]")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; without aliases, which can expand a few bytes into gigabytes."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise SettingsError(f"{path}: YAML aliases are not supported; write values out.")
            return super().compose_node(parent, index)

    text = read_text(path, max_mib=1)
    if _flow_depth(text) > _MAX_FLOW_DEPTH:
        raise SettingsError(f"{path}: has more than {_MAX_FLOW_DEPTH} brackets within each other.")
    try:
        values = yaml.load(text, Loader)
    except SettingsError:
        raise
    # Besides its own errors, PyYAML raises those of Python for values that do not fit their tag.
    except (
        yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError
    ) as problem:  # fmt: skip
        reason = str(problem).strip().splitlines() or [type(problem).__name__]
        raise SettingsError(f"{path} is not valid YAML: {_shown(reason[0])}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise SettingsError(f"{path}: expected one `name: value` per line.")
    return values


def _flow_depth(text: str) -> int:
    """How deep brackets are nested; PyYAML's time grows with the square of it."""
    steps = (1 if bracket in "[{" else -1 for bracket in _BRACKET.findall(text))
    return max(accumulate(steps), default=0)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
