"""Conversations are rendered into the token ids that the target is served with."""

from __future__ import annotations

from pathlib import Path

import pytest

from leadout.data.chat import Chat, TemplateError
from support.tiny_chat import CHAT_TEMPLATE, END_OF_TURN, START_OF_TURN, tiny_tokenizer


def words(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text, add_special_tokens=False))


def chat_with(folder: Path, template: str | None, thinking: bool | None = None) -> Chat:
    tiny_tokenizer(template).save_pretrained(folder)
    return Chat(folder, thinking)


def test_a_prompt_ends_where_the_answer_starts(chat: Chat) -> None:
    expected = words("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert chat.prompt(["Hi"]) == expected
    assert expected.count(START_OF_TURN) == 2


def test_earlier_answers_are_placed_between_the_turns(chat: Chat) -> None:
    assert chat.prompt(["Hi", "And?"], ["Ho"]) == words(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_thinking_mode_defaults_to_the_templates(tokenizer_folder: Path, chat: Chat) -> None:
    closed = words("<think>\n\n</think>\n\n")
    assert Chat(tokenizer_folder, thinking=True).prompt(["Hi"]) == chat.prompt(["Hi"])
    assert Chat(tokenizer_folder, thinking=False).prompt(["Hi"]) == chat.prompt(["Hi"]) + closed


def test_a_thinking_mode_that_the_template_ignores_is_an_error(tmp_path: Path) -> None:
    template = CHAT_TEMPLATE.replace("enable_thinking", "other_name")
    assert chat_with(tmp_path, template).prompt(["Hi"])
    with pytest.raises(TemplateError, match="does not read enable_thinking"):
        Chat(tmp_path, thinking=False)


def test_the_user_prefix_ends_where_the_users_text_starts(chat: Chat) -> None:
    assert chat.user_prefix() == words("<|im_start|>user\n")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("user: {{ messages[0].content | upper }}", "changes the user's text"),
        ("{{ messages[0].content }}", "puts nothing before the user's text"),
    ],
)
def test_a_template_without_a_user_prefix_cannot_be_used_for_self(
    tmp_path: Path, template: str, problem: str
) -> None:
    with pytest.raises(TemplateError, match=problem):
        chat_with(tmp_path, template).user_prefix()


def test_a_tokenizer_without_template_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="has no chat template"):
        chat_with(tmp_path, None)


def test_a_folder_without_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="the tokenizer cannot be loaded"):
        Chat(tmp_path)


def test_text_omits_special_tokens(chat: Chat) -> None:
    assert chat.text([*words("Grüße"), END_OF_TURN]) == "Grüße"
    assert chat.end_of_turn == END_OF_TURN


def test_hashes_distinguish_templates_and_tokenizers(tmp_path: Path, chat: Chat) -> None:
    other = chat_with(tmp_path, CHAT_TEMPLATE.replace("assistant", "model"))
    assert other.template_hash != chat.template_hash
    assert other.tokenizer_hash == chat.tokenizer_hash
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|reserved_0|>", "<|renamed|>"))
    assert Chat(tmp_path).tokenizer_hash != chat.tokenizer_hash


def test_messages_and_tools_reach_the_template(tmp_path: Path) -> None:
    template = "{{ tools | length if tools else 0 }}" + CHAT_TEMPLATE
    chat = chat_with(tmp_path, template)
    system = {"role": "system", "content": "Short."}
    call = {"role": "assistant", "content": "f()", "tool_calls": []}
    turns = ((system, {"role": "user", "content": "Hi"}), (call, {"role": "tool", "content": "3"}))
    assert chat.prompt(turns, ["the target's own answer"], [{"type": "function"}]) == words(
        "1<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nf()<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_variables_of_the_template_can_be_set_for_all_or_for_one_prompt(
    tokenizer_folder: Path, chat: Chat
) -> None:
    off = {"enable_thinking": False}
    closed = chat.prompt(["Hi"], options=off)
    assert closed == Chat(tokenizer_folder, thinking=False).prompt(["Hi"]) != chat.prompt(["Hi"])
    set_for_all = Chat(tokenizer_folder, options=off)
    assert set_for_all.prompt(["Hi"]) == closed
    assert set_for_all.prompt(["Hi"], options={"enable_thinking": True}) == chat.prompt(["Hi"])
    with pytest.raises(TemplateError, match=r"does not read effort.*it reads are enable_thinking"):
        Chat(tokenizer_folder, options={"effort": 3})


def test_variables_of_a_template_that_cannot_be_examined_are_accepted(tmp_path: Path) -> None:
    template = CHAT_TEMPLATE + "{% generation %}{% endgeneration %}"  # a tag of transformers
    chat = chat_with(tmp_path, template)
    chat.require_options({"enable_thinking": True}, "one")
    chat.require_options({"effort": 3}, "another")


def test_reasoning_targets_are_recognized_in_their_thinking_mode(
    tmp_path: Path, tokenizer_folder: Path, chat: Chat
) -> None:
    assert chat.reasons
    assert not Chat(tokenizer_folder, thinking=False).reasons
    for name, end, expected in (("opened", "<think>\n", True), ("closed", "</think>", False)):
        template = "{{ messages[0].content }}" + end
        assert chat_with(tmp_path / name, template).reasons is expected
    assert not chat_with(tmp_path / "plain", "{{ messages[0].content }}").reasons


def test_a_conversation_that_the_template_refuses_is_an_error_with_its_reason(
    tmp_path: Path,
) -> None:
    template = "{{ raise_exception('no ' + messages[0].role) if messages[0].role != 'user' }}"
    chat = chat_with(tmp_path, template + CHAT_TEMPLATE)
    with pytest.raises(TemplateError, match="refuses this conversation: no system"):
        chat.prompt([({"role": "system", "content": "a"}, {"role": "user", "content": "b"})])


def test_the_reasoning_of_gpt_oss_is_not_repeated_in_the_next_turn(tmp_path: Path) -> None:
    template = CHAT_TEMPLATE + "{# <|channel|>final<|message|> #}"
    chat = chat_with(tmp_path, template)
    written = words("<|channel|>analysis<|message|>Hm.<|end|><|channel|>final<|message|>Yes")
    assert chat.answer_text([*written, END_OF_TURN]) == "Yes"
    assert chat.answer_text(words("Yes")) == "Yes"


# What ends a user's turn: the end of a text, a special token, an added one, or text alone.
TURNS = "{%- for message in messages -%}{{ START + message.content + END }}{%- endfor -%}"


@pytest.mark.parametrize(
    ("end", "tokens"),
    [
        ("<|im_end|>\n<|im_start|>assistant\n", (END_OF_TURN,)),
        ("<|im_start|><think>\n", (START_OF_TURN, END_OF_TURN)),
        (" [/INST]", (END_OF_TURN,)),
        ("\n\n### Response:\n", (END_OF_TURN,)),
        ("", (END_OF_TURN,)),
    ],
)
def test_a_user_turn_ends_where_the_template_ends_it(
    tmp_path: Path, end: str, tokens: tuple[int, ...]
) -> None:
    template = TURNS.replace("START", "'[INST] '").replace("END", repr(end))
    chat = chat_with(tmp_path, template)
    assert chat.user_ends == tokens
    written = words(f" How many # are there?{end}{'They are three.' if end else ''}")
    assert chat.user_text(written) == "How many # are there?"
    assert chat.user_text(words("How many? ")) == "How many?"  # cut at its maximum length


def test_transformers_own_tokenizer_is_loaded_beside_one_in_mistrals_format(
    tmp_path: Path,
) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    assert chat_with(tmp_path, CHAT_TEMPLATE).prompt(["Hi"])
