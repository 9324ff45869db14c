"""The target's chat template: conversations to token ids, and the prefix of a user's turn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leadout.errors import LeadoutError

MARK = "leadout-user-turn"  # stands for a user's text while the template is taken apart


class TemplateError(LeadoutError):
    """The target's chat template is missing or cannot be used as asked."""


class Chat:
    """A tokenizer and its template, in the thinking mode the target will be served in.

    `thinking` None leaves the template's own default.
    """

    def __init__(self, folder: Path, thinking: bool | None = None) -> None:
        from transformers import AutoTokenizer

        self._folder = folder
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, ImportError) as problem:
            reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            raise TemplateError(
                f"{folder}: found no tokenizer that can be loaded ({reason}), wanted the target's "
                "own; put its tokenizer files into the folder"
            ) from None
        if not self._tokenizer.chat_template:
            raise TemplateError(
                f"{folder}: found no chat template, wanted one in the tokenizer's files; add "
                "chat_template.jinja, or serve and train the model through one that has it"
            )
        self._options: dict[str, bool] = {}
        if thinking is not None:
            self._options = {"enable_thinking": not thinking}
            opposite = self._render([MARK], [])
            self._options = {"enable_thinking": thinking}
            if self._render([MARK], []) == opposite:
                raise TemplateError(
                    f"{folder}: the chat template is the same with and without thinking, wanted "
                    "one that reads enable_thinking; leave out --thinking and --no-thinking"
                )

    @property
    def template_hash(self) -> str:
        return _hash(self._tokenizer.get_chat_template().encode())

    @property
    def tokenizer_hash(self) -> str:
        file = self._folder / "tokenizer.json"
        return _hash(file.read_bytes()) if file.exists() else _hash(repr(self._tokenizer).encode())

    @property
    def end_of_turn(self) -> int | None:
        token: int | None = self._tokenizer.eos_token_id
        return token

    def prompt(self, turns: Sequence[str], answers: Sequence[str] = ()) -> list[int]:
        """Token ids up to where the target answers the last of the user's turns."""
        return self._encode(self._render(turns, answers))

    def plain(self, text: str) -> list[int]:
        """Token ids of a text as it is, without the template."""
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def user_prefix(self) -> list[int]:
        """Token ids up to where the template expects the first words of a user."""
        before, mark, _ = self._render([MARK], []).partition(MARK)
        if not mark or not before:
            found = "nothing before the user's text" if mark else "the user's text changed"
            raise TemplateError(
                f"{self._folder}: found {found} in the chat template, wanted the text as it is "
                "after a prefix, for `self` prompts; give a prompt file instead"
            )
        return self._encode(before)

    def text(self, tokens: Sequence[int]) -> str:
        decoded: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return decoded

    def _render(self, turns: Sequence[str], answers: Sequence[str]) -> str:
        messages = []
        for number, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            if number < len(answers):
                messages.append({"role": "assistant", "content": answers[number]})
        rendered: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self._options
        )
        return rendered

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
