"""Prompts from JSONL files, Hugging Face datasets, or the target itself.

A source is written as

    path/to/file.jsonl     one JSON object per line, with "prompt", "turns" or "messages"; "id" is
                           optional
    owner/name[:split]     a Hugging Face dataset with such columns; the split defaults to "train"
    self[:N]               N user turns that the target writes itself, from an empty conversation
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from leadout.errors import LeadoutError, shown

SELF = "self"
SUPPORTED = (
    "expected a .jsonl file (one JSON object per line), a Hugging Face dataset (owner/name[:split])"
    " or self:N"
)
_FILE_SUFFIX = ".jsonl"
# Names with these endings are meant as files, not as datasets, also if they do not exist.
_OTHER_SUFFIXES = (".json", ".csv", ".tsv", ".txt", ".parquet", ".yaml", ".yml", ".gz", ".zst")
_USER_ROLES = ("user", "human")


class PromptError(LeadoutError):
    """A prompt source that cannot be read, or a prompt that cannot be used."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The user's side of a conversation. Without turns, the target writes the first one itself."""

    id: str
    source: str
    turns: tuple[str, ...]


def read_prompts(sources: Sequence[str], limit: int | None = None) -> list[Prompt]:
    """The prompts of all sources, at most `limit` of each; every id is unique."""
    prompts = [
        prompt for source in sources for prompt in islice(_read_source(source, limit), limit)
    ]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise PromptError(
                f"--prompts: the id {prompt.id!r} occurs twice. Rename one of the files, or give "
                "the prompts unique ids."
            )
        seen.add(prompt.id)
    if not prompts:
        raise PromptError(f"--prompts: there are no prompts in {', '.join(sources)}.")
    return prompts


def prompts_hash(prompts: Iterable[Prompt]) -> str:
    """A hash over ids and turns in their order, to detect that a file has changed."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.turns]).encode())
    return digest.hexdigest()


def source_name(source: str) -> str:
    """The short name of a source, as recorded in its samples."""
    if source.endswith(_FILE_SUFFIX):
        return Path(source).stem
    name, _, split = source.partition(":")
    if name == SELF:
        return SELF
    short = Path(name).name if Path(name).is_dir() else name
    return f"{short}:{split}" if split else short


def _read_source(source: str, limit: int | None) -> Iterator[Prompt]:
    name = source_name(source)
    if source.endswith(_FILE_SUFFIX):
        for number, (where, row) in enumerate(_file_rows(Path(source))):
            identity = row.get("id")
            if not isinstance(identity, str | int | float | None):
                kind = type(identity).__name__
                raise PromptError(f"{where}: `id` is a {kind}, expected a string or a number.")
            default = f"{name}/{number}"
            yield _prompt(default if identity is None else str(identity), name, row, where)
    elif name == SELF:
        for number in range(_self_count(source, limit)):
            yield Prompt(f"{SELF}/{number}", SELF, ())
    else:
        # Ids of public datasets are often not unique, and users cannot change them.
        for number, row in enumerate(_dataset_rows(source)):
            yield _prompt(f"{name}/{number}", name, row, f"{source}, row {number}")


def _prompt(identity: str, source: str, row: Mapping[str, Any], where: str) -> Prompt:
    turns = _user_turns(row, where)
    try:
        "".join([identity, *turns]).encode()
    except UnicodeEncodeError:  # JSON can hold half of a surrogate pair, which is no text
        raise PromptError(
            f"{where}: contains a lone surrogate (\\ud800 to \\udfff), which is not valid text. "
            "Remove or repair it."
        ) from None
    return Prompt(identity, source, turns)


def _self_count(source: str, limit: int | None) -> int:
    count = source.partition(":")[2]
    if source == SELF and limit is not None:
        return limit
    if not re.fullmatch("[0-9]{1,9}", count) or int(count) < 1:
        raise PromptError(
            f"--prompts {source}: expected the number of prompts that the target should write, for "
            "example self:1000."
        )
    return int(count)


def _file_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not path.is_file():
        raise PromptError(f"--prompts {path}: no such file. Check the path.")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as problem:  # neither JSON nor UTF-8, or too deep
                raise PromptError(
                    f"{where}: {problem}. Expected one JSON object per line."
                ) from None
            if not isinstance(row, dict):
                raise PromptError(f"{where}: expected a JSON object, got {type(row).__name__}.")
            yield where, row


def _dataset_rows(source: str) -> Iterator[Mapping[str, Any]]:
    if Path(source).is_file() or source.lower().endswith(_OTHER_SUFFIXES):
        raise PromptError(f"--prompts {source}: this kind of file is not supported; {SUPPORTED}.")
    try:
        import datasets
    except ImportError:
        raise PromptError(
            f"--prompts {source} was taken for a Hugging Face dataset, which requires the package "
            f"datasets: pip install 'leadout[data]'. Otherwise, {SUPPORTED}."
        ) from None
    name, _, split = source.partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except Exception as problem:  # datasets raises many kinds of errors
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise PromptError(
            f"--prompts {source}: cannot be loaded as a Hugging Face dataset ({reason}). Check the "
            f"name, the split and the network; {SUPPORTED}."
        ) from None
    yield from rows


def _user_turns(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    turns: object = None
    if "turns" in row:
        turns = row["turns"]
    elif "prompt" in row or "instruction" in row:
        turns = [row.get("prompt") or row.get("instruction")]
    elif "messages" in row or "conversations" in row:
        turns = _turns_of_messages(row.get("messages") or row.get("conversations"))
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
        raise PromptError(
            f"{where}: no user turns. Expected non-empty text in `prompt`, `turns`, `messages`, "
            f"`instruction` or `conversations`; the fields are {shown(sorted(row))}."
        )
    return tuple(turns)


def _turns_of_messages(messages: object) -> list[object]:
    """The user's messages, with the keys of OpenAI (role, content) or ShareGPT (from, value)."""
    if not isinstance(messages, list):
        return []
    return [
        message.get("content") or message.get("value")
        for message in messages
        if isinstance(message, dict) and (message.get("role") or message.get("from")) in _USER_ROLES
    ]
