"""Prompts are read from every kind of source; errors name the source and the line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leadout.data.prompts import Prompt, PromptError, prompts_hash, read_prompts, source_name


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
                    {"role": "system", "content": "be brief"},
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
        for prompts in ([one, two], [two, one], [one], [Prompt("a", "s", ("x", "Y")), two])
    }
    assert len(hashes) == 4


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
