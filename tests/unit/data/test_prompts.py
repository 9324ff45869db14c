"""Prompts are read from each kind of source, and what cannot be read is named."""

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
def test_the_users_turns_are_found_in_every_spelling(
    file_of: Callable[..., str], row: dict[str, Any], turns: tuple[str, ...]
) -> None:
    assert read_prompts([file_of(row)]) == [Prompt("asked/0", "asked", turns)]


def test_ids_of_a_file_are_kept_and_blank_lines_passed_over(file_of: Callable[..., str]) -> None:
    source = file_of({"id": 0, "prompt": "a"}, {"prompt": "b"}, {"id": "mine/7", "prompt": "c"})
    with Path(source).open("a") as file:
        file.write("\n\n")
    assert [prompt.id for prompt in read_prompts([source])] == ["0", "asked/1", "mine/7"]


def test_the_limit_holds_for_each_source(file_of: Callable[..., str]) -> None:
    rows = [{"prompt": str(n)} for n in range(5)]
    sources = [file_of(*rows, name="a"), file_of(*rows, name="b"), "self:5"]
    ids = [prompt.id for prompt in read_prompts(sources, limit=2)]
    assert ids == ["a/0", "a/1", "b/0", "b/1", "self/0", "self/1"]


def test_a_limit_is_a_number_for_self() -> None:
    expected = [Prompt("self/0", "self", ()), Prompt("self/1", "self", ())]
    assert read_prompts(["self"], limit=2) == read_prompts(["self:2"]) == expected


def test_a_file_may_be_called_self(file_of: Callable[..., str]) -> None:
    assert read_prompts([file_of({"prompt": "a"}, name="self")])[0].turns == ("a",)


def test_a_dataset_is_read_by_split_with_row_numbers_for_ids(tmp_path: Path) -> None:
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


def test_the_hash_sees_every_turn_and_the_order() -> None:
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
    ],
)
def test_a_row_without_user_turns_is_named(
    file_of: Callable[..., str], row: dict[str, Any]
) -> None:
    with pytest.raises(PromptError, match=r"asked\.jsonl, line 2: .*wanted user turns"):
        read_prompts([file_of({"prompt": "fine"}, row)])


def test_a_line_that_is_no_json_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    for line, words in ((b"{broken", "wanted one JSON object"), (b"[1]", "found list")):
        path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
        with pytest.raises(PromptError, match=f"line 2: .*{words}"):
            read_prompts([str(path)])
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(PromptError, match=r"line 1: .*wanted one JSON object"):
        read_prompts([str(path)])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"gone\.jsonl: found no such file"):
        read_prompts([str(tmp_path / "gone.jsonl")])


def test_an_empty_file_is_an_error(file_of: Callable[..., str]) -> None:
    with pytest.raises(PromptError, match="found no prompt in"):
        read_prompts([file_of()])


def test_the_same_id_twice_is_an_error(file_of: Callable[..., str]) -> None:
    source = file_of({"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"})
    with pytest.raises(PromptError, match="found the id 'x' twice"):
        read_prompts([source])


@pytest.mark.parametrize("source", ["self", "self:", "self:0", "self:many", "self:-1"])
def test_self_wants_a_number(source: str) -> None:
    with pytest.raises(PromptError, match="for instance self:1000"):
        read_prompts([source])


def test_a_dataset_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"nowhere: found neither .* nor a dataset"):
        read_prompts([str(tmp_path / "nowhere")])


def test_without_the_datasets_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PromptError, match=r"pip install 'leadout\[data\]'"):
        read_prompts(["owner/name"])
