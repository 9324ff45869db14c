"""Prompts are read from every kind of source; errors name the source and the line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leadout.data.prompts import (
    Prompt,
    PromptError,
    prompts_hash,
    read_prompts,
    source_name,
    without_duplicates,
)


@pytest.fixture
def file_of(tmp_path: Path) -> Callable[..., str]:
    def write(*rows: Any, name: str = "asked") -> str:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"turns": ["one", "two"]}, ("one", "two")),
        ({"prompt": "one"}, ("one",)),
        ({"instruction": "one", "output": "not ours"}, ("one",)),
        (
            {
                "messages": [
                    {"role": "user", "content": "one"},
                    {"role": "assistant", "content": "another model's"},
                    {"role": "user", "content": "two"},
                ]
            },
            ("one", "two"),
        ),
        (
            {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "x"}]},
            ("one",),
        ),
    ],
)
def test_user_turns_are_read_from_all_supported_fields(
    file_of: Callable[..., str], row: dict[str, Any], turns: tuple[str, ...]
) -> None:
    assert read_prompts([file_of(row)]) == [Prompt("asked/0", "asked", turns)]


SYSTEM = {"role": "system", "content": "be brief"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_system_messages_and_tools_are_kept(file_of: Callable[..., str]) -> None:
    as_text = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    calls = {"role": "assistant", "content": None, "tool_calls": [as_text]}
    results = [{"role": "tool", "content": t, "tool_call_id": "c"} for t in ("3", "4")]
    messages = [SYSTEM, user("one"), calls, *results, {"role": "assistant", "content": "seven"}]
    messages.append(user("two"))
    row = {"messages": messages, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True}}
    recorded = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    (prompt,) = read_prompts([file_of(row)])
    assert prompt.turns == ((SYSTEM, user("one")), (recorded, *results), "two")
    assert prompt.tools == (TOOL,)
    assert prompt.options == {"enable_thinking": True}
    assert prompt.text == "one"
    (other,) = read_prompts([file_of({"prompt": "one", "system": "be brief"})])
    assert other.turns == ((SYSTEM, user("one")),)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_empty_system_messages_are_dropped(file_of: Callable[..., str], role: str) -> None:
    shared = [{"from": "system", "value": ""}, {"from": "human", "value": "one"}]
    (prompt,) = read_prompts([file_of({"conversations": shared})])
    assert prompt.turns == ("one",)
    messages = [{"role": role, "content": None}, user("one"), {"role": role, "content": ""}]
    (prompt,) = read_prompts([file_of({"messages": [*messages, user("two")]})])
    assert prompt.turns == ("one", "two")
    (prompt,) = read_prompts([file_of({"messages": messages, "system": "be brief"})])
    assert prompt.turns == ((SYSTEM, user("one")),)


@pytest.mark.parametrize("content", ["", None, []])
def test_tools_may_return_nothing(file_of: Callable[..., str], content: Any) -> None:
    calls = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c"}
    messages = [user("one"), calls, {**result, "content": content}]
    (prompt,) = read_prompts([file_of({"messages": messages})])
    assert prompt.turns == ("one", (calls, {**result, "content": ""}))


def test_text_in_parts_is_joined_and_other_parts_are_refused(file_of: Callable[..., str]) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (prompt,) = read_prompts([file_of({"messages": [user(parts)]})])  # type: ignore[arg-type]
    assert prompt.turns == ("ab",)
    parts.append({"type": "image_url", "text": ""})
    with pytest.raises(PromptError, match="line 1: message 0 has a part of type 'image_url'"):
        read_prompts([file_of({"messages": [user(parts)]})])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "tools": "no json"}, "`tools`: .*expected JSON"),
        ({"prompt": "a", "tools": [3]}, "`tools` is not a list of objects"),
        ({"prompt": "a", "chat_template_kwargs": [1]}, "is not an object"),
        ({"messages": [{"role": "critic", "content": "a"}]}, "has the role 'critic'"),
    ],
)
def test_wrong_tools_and_roles_are_errors(
    file_of: Callable[..., str], row: dict[str, Any], message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        read_prompts([file_of(row)])


def test_parquet_files_are_read_like_json(file_of: Callable[..., str], tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [
        {"id": "x", "messages": [SYSTEM, user("one")], "tools": json.dumps([TOOL])},
        {"id": None, "messages": [{**user("two"), "name": "ann"}], "tools": None},
    ]
    path = tmp_path / "asked.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert read_prompts([str(path)]) == read_prompts([file_of(*rows)])
    assert [prompt.id for prompt in read_prompts([str(path)], limit=1)] == ["x"]
    path.write_bytes(b"not parquet")
    with pytest.raises(PromptError, match=r"asked\.parquet: cannot be read as parquet"):
        read_prompts([str(path)])


def test_bad_rows_can_be_rejected_unless_all_are_bad(file_of: Callable[..., str]) -> None:
    rejected: list[tuple[str, str]] = []
    source = file_of({"prompt": "a"}, {"question": "b"}, [1], {"prompt": "c"})
    prompts = read_prompts([source], reject=lambda *each: rejected.append(each))
    assert [prompt.id for prompt in prompts] == ["asked/0", "asked/3"]
    assert [where for where, _ in rejected] == [f"{source}, line 2", f"{source}, line 3"]
    assert rejected[0][1].startswith("no user turns")
    with pytest.raises(PromptError, match="line 1: no user turns"):
        read_prompts([file_of({"question": "b"})], reject=lambda *_: None)


def test_repeated_conversations_are_left_out_and_counted(file_of: Callable[..., str]) -> None:
    sources = [
        file_of({"prompt": "a"}, {"prompt": "b"}, {"turns": ["a"]}, name="one"),
        file_of({"prompt": "b"}, {"prompt": "a", "system": "be brief"}, name="two"),
        "self:3",
    ]
    kept, duplicates = without_duplicates(read_prompts(sources))
    names = ["one/0", "one/1", "two/1", "self/0", "self/1", "self/2"]
    assert [prompt.id for prompt in kept] == names
    assert duplicates == 2


def test_ids_are_kept_and_blank_lines_ignored(file_of: Callable[..., str]) -> None:
    source = file_of({"id": 0, "prompt": "a"}, {"prompt": "b"}, {"id": "mine/7", "prompt": "c"})
    with Path(source).open("a") as file:
        file.write("\n\n")
    assert [prompt.id for prompt in read_prompts([source])] == ["0", "asked/1", "mine/7"]


def test_the_limit_applies_to_each_source(file_of: Callable[..., str]) -> None:
    rows = [{"prompt": str(n)} for n in range(5)]
    sources = [file_of(*rows, name="a"), file_of(*rows, name="b"), "self:5"]
    ids = [prompt.id for prompt in read_prompts(sources, limit=2)]
    assert ids == ["a/0", "a/1", "b/0", "b/1", "self/0", "self/1"]


def test_the_limit_can_give_the_number_for_self() -> None:
    expected = [Prompt("self/0", "self", ()), Prompt("self/1", "self", ())]
    assert read_prompts(["self"], limit=2) == read_prompts(["self:2"]) == expected


def test_a_file_can_be_named_self(file_of: Callable[..., str]) -> None:
    assert read_prompts([file_of({"prompt": "a"}, name="self")])[0].turns == ("a",)


def test_a_dataset_split_is_read_with_row_numbers_as_ids(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    for split, words in (("train", ["a", "b"]), ("test", ["c"])):
        rows = ({"id": "same", "messages": [{"role": "user", "content": w}]} for w in words)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_prompts([str(folder)], limit=1) == [Prompt("chats/0", "chats", ("a",))]  # a stream
    read = read_prompts([str(folder), f"{folder}:test"])
    assert read == [
        Prompt("chats/0", "chats", ("a",)),
        Prompt("chats/1", "chats", ("b",)),
        Prompt("chats:test/0", "chats:test", ("c",)),
    ]


def test_sources_have_short_names() -> None:
    assert source_name("some/where/chats.jsonl") == "chats"
    assert source_name("owner/name") == "owner/name"
    assert source_name("owner/name:test") == "owner/name:test"
    assert source_name("self:10") == "self"


def test_the_hash_depends_on_every_turn_and_on_the_order() -> None:
    one, two = Prompt("a", "s", ("x", "y")), Prompt("b", "s", ("z",))
    hashes = {
        prompts_hash(prompts)
        for prompts in (
            [one, two],
            [two, one],
            [one],
            [Prompt("a", "s", ("x", "Y")), two],
            [Prompt("a", "s", ("x", "y"), tools=(TOOL,)), two],
            [Prompt("a", "s", ("x", "y"), options={"enable_thinking": True}), two],
        )
    }
    assert len(hashes) == 6


@pytest.mark.parametrize(
    "row",
    [
        {"question": "a"},
        {"turns": []},
        {"turns": "a"},
        {"turns": ["a", ""]},
        {"turns": ["a", 3]},
        {"prompt": None},
        {"messages": "a"},
        {"messages": ["a"]},
        {"messages": [{"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": 3}]},
        {"messages": [{"role": "system", "content": ""}]},
        {"conversations": [{"from": ["human"], "value": "hi"}]},
    ],
)
def test_a_row_without_user_turns_is_an_error(
    file_of: Callable[..., str], row: dict[str, Any]
) -> None:
    with pytest.raises(PromptError, match=r"asked\.jsonl, line 2: no user turns"):
        read_prompts([file_of({"prompt": "fine"}, row)])


def test_a_line_that_is_not_a_json_object_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    for line, words in ((b"{broken", "Expected one JSON object"), (b"[1]", "got list")):
        path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
        with pytest.raises(PromptError, match=f"line 2: .*{words}"):
            read_prompts([str(path)])
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(PromptError, match=r"line 1: .*Expected one JSON object"):
        read_prompts([str(path)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "\\ud800", "prompt": "hello"}', "contains a lone surrogate"),
        (b'{"prompt": "\\udfff"}', "contains a lone surrogate"),
        (b'{"prompt": ' + 100_000 * b"[" + 100_000 * b"]" + b"}", "recursion"),
        (b'{"id": ["a"], "prompt": "hello"}', "`id` is a list, expected a string or a number"),
    ],
)
def test_unusual_json_is_an_error_with_its_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(PromptError, match=rf"asked\.jsonl, line 1: .*{message}"):
        read_prompts([str(path)])


def test_an_id_of_null_is_no_id(file_of: Callable[..., str]) -> None:
    source = file_of({"id": None, "prompt": "a"}, {"id": None, "prompt": "b"})
    assert [prompt.id for prompt in read_prompts([source])] == ["asked/0", "asked/1"]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"gone\.jsonl: no such file"):
        read_prompts([str(tmp_path / "gone.jsonl")])


def test_an_empty_file_is_an_error(file_of: Callable[..., str]) -> None:
    with pytest.raises(PromptError, match="no prompts in"):
        read_prompts([file_of()])


def test_a_repeated_id_is_an_error(file_of: Callable[..., str]) -> None:
    source = file_of({"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"})
    with pytest.raises(PromptError, match="the id 'x' occurs twice"):
        read_prompts([source])


@pytest.mark.parametrize(
    "source", ["self", "self:", "self:0", "self:many", "self:-1", "self:²", "self:" + 5000 * "9"]
)
def test_self_requires_a_number(source: str) -> None:
    with pytest.raises(PromptError, match="for example self:1000"):
        read_prompts([source])


def test_a_dataset_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        PromptError, match=r"nowhere: cannot be loaded as a .*dataset .*expected a \.jsonl"
    ):
        read_prompts([str(tmp_path / "nowhere")])


@pytest.mark.parametrize("name", ["asked.json", "asked.csv", "ASKED.JSON", "asked"])
def test_an_unsupported_file_is_an_error_that_names_what_is_supported(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("[]")
    with pytest.raises(PromptError, match=r"not supported; expected a \.jsonl file"):
        read_prompts([str(tmp_path / name)])


def test_a_missing_json_file_is_not_taken_for_a_dataset() -> None:
    with pytest.raises(PromptError, match=r"not supported; expected a \.jsonl file"):
        read_prompts(["missing.json"])


def test_without_the_datasets_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PromptError, match=r"pip install 'leadout\[data\]'"):
        read_prompts(["owner/name"])
