"""The target's chat template: conversations as token ids, and the prefix of a user turn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leadout.errors import LeadoutError

_PLACEHOLDER = "leadout-user-turn"  # a user's text, to see what the template does with it


class TemplateError(LeadoutError):
    """The target's chat template is missing or cannot be used as requested."""


class Chat:
    """A tokenizer and its chat template, in the thinking mode the target will be served in.

    `thinking=None` keeps the template's own default.
    """

    def __init__(self, folder: Path, thinking: bool | None = None) -> None:
        from transformers import AutoTokenizer

        self._folder = folder
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, ImportError) as problem:
            reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            raise TemplateError(
                f"{folder}: the tokenizer cannot be loaded ({reason}). Put the target's own "
                "tokenizer files into the folder."
            ) from None
        if not self._tokenizer.chat_template:
            raise TemplateError(
                f"{folder}: the tokenizer has no chat template. Add the model's "
                "chat_template.jinja to the folder."
            )
        self._options: dict[str, bool] = {}
        if thinking is not None:
            self._options = {"enable_thinking": not thinking}
            opposite = self._render([_PLACEHOLDER], [])
            self._options = {"enable_thinking": thinking}
            if self._render([_PLACEHOLDER], []) == opposite:
                raise TemplateError(
                    f"{folder}: the chat template does not read enable_thinking, so it has no "
                    "thinking mode. Remove --thinking or --no-thinking."
                )

    @property
    def template_hash(self) -> str:
        return hashlib.sha256(self._tokenizer.get_chat_template().encode()).hexdigest()

    @property
    def tokenizer_hash(self) -> str:
        file = self._folder / "tokenizer.json"
        content = file.read_bytes() if file.exists() else repr(self._tokenizer).encode()
        return hashlib.sha256(content).hexdigest()

    @property
    def end_of_turn(self) -> int | None:
        token: int | None = self._tokenizer.eos_token_id
        return token

    def prompt(self, turns: Sequence[str], answers: Sequence[str] = ()) -> list[int]:
        """Token ids of the conversation, up to the start of the answer to the last turn."""
        return self._encode(self._render(turns, answers))

    def plain(self, text: str) -> list[int]:
        """Token ids of a text without the template."""
        return list(self._tokenizer.encode(text))

    def user_prefix(self) -> list[int]:
        """Token ids of what the template puts before the text of a first user turn."""
        before, placeholder, _ = self._render([_PLACEHOLDER], []).partition(_PLACEHOLDER)
        if not placeholder or not before:
            what = "puts nothing before" if placeholder else "changes"
            raise TemplateError(
                f"{self._folder}: the chat template {what} the user's text, so the target cannot "
                "write `self` prompts. Use a prompt file instead."
            )
        return self._encode(before)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

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
        return list(self._tokenizer.encode(text, add_special_tokens=False))
