"""Prompts from JSONL and parquet files, Hugging Face datasets, or the target itself.

A source is written as

    path/to/file.jsonl     one JSON object per line, with "prompt", "turns" or "messages"; "id",
                           "system", "tools" and "chat_template_kwargs" are optional
    path/to/file.parquet   the same, as columns
    owner/name[:split]     a Hugging Face dataset with such columns; the split defaults to "train"
    self[:N]               N user turns that the target writes itself, from an empty conversation

Answers in "messages" are left out, because the target writes its own. Calls of tools are kept,
since the results that follow belong to them; the target answers before and after them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leadout.data.chat import Message, Turn, messages_of
from leadout.errors import LeadoutError, shortened, shown
from leadout.files import MAX_NESTING, is_deeper, read_lines

SELF = "self"
SUPPORTED = (
    "expected a .jsonl file (one JSON object per line), a .parquet file, a Hugging Face dataset "
    "(owner/name[:split]) or self:N"
)
_PARQUET = ".parquet"
_FILE_SUFFIXES = (".jsonl", _PARQUET)
# Names with these endings are meant as files, not as datasets, also if they do not exist.
_OTHER_SUFFIXES = (".json", ".csv", ".tsv", ".txt", ".yaml", ".yml", ".gz", ".zst")
_ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    # Of ShareGPT.
    **{"human": "user", "gpt": "assistant", "observation": "tool"},
}


class PromptError(LeadoutError):
    """A prompt source that cannot be read, or a prompt that cannot be used."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation without its answers. Without turns, the target writes the first one itself."""

    id: str
    source: str
    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs

    @property
    def text(self) -> str:
        """The user's text in the first turn."""
        return next(
            str(each["content"]) for each in messages_of(self.turns[0]) if each["role"] == "user"
        )

    @property
    def content(self) -> list[Any]:
        """All that determines the answers, for hashes."""
        more = [self.tools, self.options] if self.tools or self.options else []
        return [self.turns, *more]


Reject = Callable[[str, str], None]  # where a row is, and why it cannot be used


def read_prompts(
    sources: Sequence[str], limit: int | None = None, reject: Reject | None = None
) -> list[Prompt]:
    """The prompts of all sources, at most `limit` of each; every id is unique.

    A row that cannot be used is an error, or is passed to `reject` if the source has others.
    """
    prompts: list[Prompt] = []
    for source in sources:
        rejected: list[PromptError] = []
        before = len(prompts)
        for found in _read_source(source, limit):
            if len(prompts) - before == limit:
                break
            if isinstance(found, Prompt):
                prompts.append(found)
            elif reject is None:
                raise found
            else:
                rejected.append(found)
        if rejected and len(prompts) == before:  # not a few bad rows, but another format
            raise rejected[0]
        for problem in rejected:
            assert reject is not None
            where, _, reason = str(problem).partition(": ")
            reject(where, reason)
    ids: set[str] = set()
    for prompt in prompts:
        if prompt.id in ids:
            raise PromptError(
                f"--prompts: the id {shown(prompt.id)} occurs twice. Rename one of the files, or "
                "give the prompts unique ids."
            )
        ids.add(prompt.id)
    if not prompts:
        raise PromptError(f"--prompts: there are no prompts in {', '.join(sources)}.")
    return prompts


def without_duplicates(prompts: Iterable[Prompt]) -> tuple[list[Prompt], int]:
    """The prompts without repeated conversations, and how many were left out.

    Those that the target writes itself are all different.
    """
    kept: list[Prompt] = []
    seen: set[bytes] = set()
    duplicates = 0
    for prompt in prompts:
        key = hashlib.sha256(json.dumps(prompt.content, sort_keys=True).encode()).digest()
        if prompt.turns and key in seen:
            duplicates += 1
        else:
            kept.append(prompt)
        seen.add(key)
    return kept, duplicates


def prompts_hash(prompts: Iterable[Prompt]) -> str:
    """A hash over ids and contents in their order, to detect that a file has changed."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, *prompt.content]).encode())
    return digest.hexdigest()


def source_name(source: str) -> str:
    """The short name of a source, as recorded in its samples."""
    if source.endswith(_FILE_SUFFIXES):
        return Path(source).stem
    name, _, split = source.partition(":")
    if name == SELF:
        return SELF
    short = Path(name).name if Path(name).is_dir() else name
    return f"{short}:{split}" if split else short


def _read_source(source: str, limit: int | None) -> Iterator[Prompt | PromptError]:
    name = source_name(source)
    if source.endswith(_FILE_SUFFIXES):
        path = Path(source)
        if not path.is_file():
            raise PromptError(f"--prompts {path}: no such file. Check the path.")
        rows = _parquet_rows(path) if source.endswith(_PARQUET) else _jsonl_rows(path)
        for number, (where, row) in enumerate(rows):
            yield _prompt_or_error(f"{name}/{number}", name, row, where, keep_id=True)
    elif name == SELF:
        for number in range(_self_count(source, limit)):
            yield Prompt(f"{SELF}/{number}", SELF, ())
    else:
        # Ids of public datasets are often not unique, and users cannot change them.
        for number, row in enumerate(_dataset_rows(source, limit)):
            where = f"{source}, row {number}"
            yield _prompt_or_error(f"{name}/{number}", name, row, where, keep_id=False)


def _prompt_or_error(
    default_id: str, source: str, row: object, where: str, keep_id: bool
) -> Prompt | PromptError:
    try:
        if isinstance(row, PromptError):
            return row
        if not isinstance(row, Mapping):
            raise PromptError(f"{where}: expected a JSON object, got {type(row).__name__}.")
        identity = row.get("id") if keep_id else None
        if not isinstance(identity, str | int | float | None):
            kind = type(identity).__name__
            raise PromptError(f"{where}: `id` is a {kind}, expected a string or a number.")
        name = default_id if identity is None else str(identity)
        prompt = Prompt(name, source, _turns(row, where), _tools(row, where), _options(row, where))
        _require_text([name, prompt.content], where)
    except PromptError as problem:
        return problem
    return prompt


def _require_text(content: object, where: str) -> None:
    if is_deeper(content, MAX_NESTING):
        raise PromptError(f"{where}: is nested deeper than {MAX_NESTING} levels.")
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # JSON can hold half of a surrogate pair, which is no text
        raise PromptError(
            f"{where}: contains a lone surrogate (\\ud800 to \\udfff), which is not valid text. "
            "Remove or repair it."
        ) from None
    except (TypeError, ValueError) as problem:  # a date or bytes in a parquet file
        reason = shortened(str(problem))
        raise PromptError(f"{where}: cannot be written as JSON: {reason}.") from None


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


def _jsonl_rows(path: Path) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as problem:  # neither JSON nor UTF-8, or too deep
            reason = shortened(str(problem))
            yield where, PromptError(f"{where}: {reason}. Expected one JSON object per line.")


def _parquet_rows(path: Path) -> Iterator[tuple[str, object]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise PromptError(
            f"--prompts {path}: reading parquet requires pyarrow: pip install 'leadout[data]'."
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):  # a few rows in memory at a time
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", _without_nulls(row)
                    number += 1
    except (ArrowException, OSError, ValueError, OverflowError) as problem:
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise PromptError(
            f"--prompts {path}: cannot be read as parquet: {shortened(reason)}"
        ) from None


def _without_nulls(value: Any) -> Any:
    """Columnar files give every message all keys of all messages, most of them null."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _dataset_rows(source: str, limit: int | None) -> Iterator[Mapping[str, Any]]:
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
        # With a limit, only as much as needed is downloaded. Without one, everything is, and a
        # resumed job then reads it from the disk.
        rows = datasets.load_dataset(name, split=split or "train", streaming=limit is not None)
        yield from map(_without_nulls, rows)
    except Exception as problem:  # datasets raises many kinds of errors
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise PromptError(
            f"--prompts {source}: cannot be loaded as a Hugging Face dataset ({reason}). Check the "
            f"name, the split and the network; {SUPPORTED}."
        ) from None


def _turns(row: Mapping[str, Any], where: str) -> tuple[Turn, ...]:
    found: list[Turn] | None = None
    if "turns" in row:
        found = _texts(row["turns"])
    elif "prompt" in row or "instruction" in row:
        found = _texts([row.get("prompt") or row.get("instruction")])
    elif "messages" in row or "conversations" in row:
        found = _turns_of_messages(row.get("messages") or row.get("conversations"), where)
    if not found:
        raise PromptError(
            f"{where}: no user turns. Expected non-empty text in `prompt`, `turns`, `messages`, "
            f"`instruction` or `conversations`; the fields are {shown(sorted(map(str, row)))}."
        )
    system = row.get("system")
    if isinstance(system, str) and system:
        first = messages_of(found[0])
        if first[0]["role"] == "user":
            found[0] = ({"role": "system", "content": system}, *first)
    return tuple(found)


def _texts(turns: object) -> list[Turn] | None:
    if not isinstance(turns, list) or not all(isinstance(each, str) and each for each in turns):
        return None
    return list(turns)


def _turns_of_messages(messages: object, where: str) -> list[Turn] | None:
    """Messages with the keys of OpenAI (role, content) or ShareGPT (from, value), as turns."""
    if not isinstance(messages, list):
        return None
    turns: list[Turn] = []
    waiting: list[Message] = []  # since the last answer
    for number, message in enumerate(messages):
        read = _message(message, f"{where}: message {number}")
        if read is None:
            return None
        if read["role"] == "assistant" and "tool_calls" not in read:
            continue
        if read["role"] in ("system", "developer") and not read["content"]:
            continue
        waiting.append(read)
        following = messages[number + 1] if number + 1 < len(messages) else {}
        more_results = read["role"] == "tool" and _role(following) == "tool"
        if read["role"] in ("user", "tool") and not more_results:  # here the target answers
            plain = len(waiting) == 1 and waiting[0].keys() == {"role", "content"}
            is_user = plain and waiting[0]["role"] == "user"
            turns.append(str(waiting[0]["content"]) if is_user else tuple(waiting))
            waiting = []
    # What no user began (only a system message, or the results of unknown calls) is no turn.
    is_begun = bool(turns) and any(each["role"] == "user" for each in messages_of(turns[0]))
    return turns if is_begun else None


def _role(message: object) -> str | None:
    role = None
    if isinstance(message, Mapping):
        role = message.get("role") or message.get("from")
    return _ROLES.get(role) if isinstance(role, str) else None


def _message(message: object, where: str) -> Message | None:
    """A message as chat templates take it; None if it is none."""
    role = _role(message)
    if role is None or not isinstance(message, Mapping):
        if isinstance(message, Mapping) and isinstance(message.get("role"), str):
            raise PromptError(
                f"{where} has the role {shown(message['role'])}; expected {', '.join(_ROLES)}."
            )
        return None
    given = (message.get("content"), message.get("value"))
    content = next((each for each in given if each not in (None, "", [])), "")
    if isinstance(content, list):
        content = _text_of_parts(content, where)
    known = {"role": role, "content": content or ""}
    if role == "assistant":
        if message.get("tool_calls"):
            return {**known, "tool_calls": _arguments_as_objects(message["tool_calls"])}
        return known
    # Tools may return nothing, and many datasets have empty system messages.
    if not isinstance(content, str) or (not content and role == "user"):
        return None
    more = {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}
    return known | more


def _text_of_parts(parts: list[Any], where: str) -> str | None:
    """The text of a message in parts; other parts, such as images, need another kind of target."""
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", None):
            raise PromptError(f"{where} has a part of type {shown(kind)}; only text is supported.")
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    if not texts or not all(isinstance(text, str) for text in texts):
        return None
    return "".join(map(str, texts))


def _arguments_as_objects(calls: Any) -> Any:
    """OpenAI's calls carry arguments as JSON text; chat templates expect objects."""
    return [_with_object(call) for call in calls] if isinstance(calls, list) else calls


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):  # the model that made the call wrote no JSON
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(row: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    tools = _parsed(row.get("tools"), f"{where}: `tools`")
    if tools is None or tools == []:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise PromptError(f"{where}: `tools` is not a list of objects, as OpenAI's API takes them.")
    return tuple(tools)


def _options(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    options = _parsed(row.get("chat_template_kwargs"), f"{where}: `chat_template_kwargs`")
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise PromptError(f"{where}: `chat_template_kwargs` is not an object.")
    return options


def _parsed(value: object, where: str) -> object:
    """Parquet files often hold nested values as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except (ValueError, RecursionError) as problem:
        raise PromptError(f"{where}: {shortened(str(problem))}; expected JSON.") from None
