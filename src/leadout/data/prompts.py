"""Where prompts come from: JSONL files, Hugging Face datasets, or the target itself.

A source is written as

    path/to/file.jsonl     one object a line, with "turns", "prompt" or "messages", and maybe "id"
    owner/name[:split]     a Hugging Face dataset with such columns; split "train" unless told
    self[:N]               N user turns that the target writes from its empty chat template
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from leadout.errors import LeadoutError

SELF = "self"
_FILE_SUFFIX = ".jsonl"


class PromptError(LeadoutError):
    """A prompt source that cannot be read as one."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The user's side of a conversation; no turns: the target writes the first one itself."""

    id: str
    source: str
    turns: tuple[str, ...]


def read_prompts(sources: Sequence[str], limit: int | None = None) -> list[Prompt]:
    """The prompts of all sources, at most `limit` of each; ids are unique or it is an error."""
    prompts = [
        prompt for source in sources for prompt in islice(_read_source(source, limit), limit)
    ]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise PromptError(
                f"--prompts: found the id {prompt.id!r} twice, wanted each once; rename one of the "
                "files, or give the prompts other ids"
            )
        seen.add(prompt.id)
    if not prompts:
        raise PromptError(f"--prompts: found no prompt in {', '.join(sources)}, wanted at least 1")
    return prompts


def prompts_hash(prompts: Iterable[Prompt]) -> str:
    """Of every prompt in its order: tells a file that has changed from the one it was."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.turns]).encode())
    return digest.hexdigest()


def source_name(source: str) -> str:
    """The short name that samples of this source carry."""
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
        for number, (where, row) in enumerate(_rows_of_file(Path(source))):
            identity = str(row.get("id", f"{name}/{number}"))
            yield Prompt(identity, name, _user_turns(row, where))
    elif name == SELF:
        for number in range(_self_count(source, limit)):
            yield Prompt(f"{SELF}/{number}", SELF, ())
    else:
        # A dataset's own ids are often not unique, and its reader cannot mend them.
        for number, row in enumerate(_rows_of_dataset(source)):
            turns = _user_turns(row, f"{source}, row {number}")
            yield Prompt(f"{name}/{number}", name, turns)


def _self_count(source: str, limit: int | None) -> int:
    count = source.partition(":")[2]
    if source == SELF and limit is not None:
        return limit
    if not count.isdecimal() or int(count) < 1:
        raise PromptError(
            f"--prompts {source}: found {count or 'no number'!r}, wanted how many prompts the "
            "target shall write, for instance self:1000"
        )
    return int(count)


def _rows_of_file(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not path.is_file():
        raise PromptError(f"--prompts {path}: found no such file, wanted JSONL; check the path")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as problem:  # no JSON, or no text
                raise PromptError(f"{where}: {problem}; wanted one JSON object a line") from None
            if not isinstance(row, dict):
                raise PromptError(f"{where}: found {type(row).__name__}, wanted a JSON object")
            yield where, row


def _rows_of_dataset(source: str) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise PromptError(
            f"--prompts {source}: a Hugging Face dataset needs the package datasets, which is not "
            "installed; pip install 'leadout[data]'"
        ) from None
    name, _, split = source.partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except Exception as problem:  # datasets raises many kinds; all mean that it cannot be had
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise PromptError(
            f"--prompts {source}: found neither a .jsonl file nor a dataset that can be loaded "
            f"({reason}); check the name, the split and the network"
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
            f"{where}: found the fields {sorted(row)}, wanted user turns as non-empty text in "
            "`turns`, `prompt`, `instruction`, `messages` or `conversations`"
        )
    return tuple(turns)


def _turns_of_messages(messages: object) -> list[object]:
    """What the user says in a list of messages, in either of the two common spellings."""
    if not isinstance(messages, list):
        return []
    of_user = (
        message
        for message in messages
        if isinstance(message, dict)
        and (message.get("role") or message.get("from")) in {"user", "human"}
    )
    return [message.get("content") or message.get("value") for message in of_user]
