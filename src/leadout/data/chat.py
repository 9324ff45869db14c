"""The target's chat template: conversations as token ids, and the prefix of a user turn.

A conversation is a sequence of turns, each with everything that comes before one answer: the
user's text, or messages where there is more than that (a system message, the results of tools).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from leadout.errors import LeadoutError

Message: TypeAlias = Mapping[str, Any]  # as a chat template takes it: role, content, ...
Turn: TypeAlias = str | tuple[Message, ...]

# What templates of reasoning models contain: a switch, or the marks around the reasoning.
_REASONING = ("enable_thinking", "reasoning_effort", "<think>", "<|channel|>analysis")
_FINAL = "<|channel|>final<|message|>"  # before the answer itself in the format of gpt-oss

_PLACEHOLDER = "leadout-user-turn"  # a user's text, to see what the template does with it


_GIVEN = frozenset(  # variables that are no options
    {
        "messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token",
        "pad_token", "unk_token", "raise_exception", "strftime_now", "namespace", "range",
    }
)  # fmt: skip


class TemplateError(LeadoutError):
    """The target's chat template is missing or cannot be used as requested."""


class Chat:
    """A tokenizer and its chat template, in the thinking mode the target will be served in.

    `thinking=None` keeps the template's own default. `options` are further variables of the
    template, which OpenAI-compatible servers call chat_template_kwargs.
    """

    def __init__(
        self,
        folder: Path,
        thinking: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = folder
        try:
            self._tokenizer = load_tokenizer(folder)
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
        self._variables: frozenset[str] | None = None
        self._options: dict[str, Any] = dict(options or {})
        self.require_options(self._options, "--chat-template-kwargs")
        if thinking is not None:
            self._options["enable_thinking"] = not thinking
            opposite = self._render([_PLACEHOLDER])
            self._options["enable_thinking"] = thinking
            if self._render([_PLACEHOLDER]) == opposite:
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

    @property
    def options(self) -> dict[str, Any]:
        """The variables that every prompt is rendered with."""
        return dict(self._options)

    @property
    def reasons(self) -> bool:
        """Whether the target writes its reasoning before an answer, in this thinking mode."""
        end = self._render([_PLACEHOLDER]).rpartition(_PLACEHOLDER)[2]
        if "<think>" in end or "</think>" in end:  # opened for the target, or closed at once
            return "</think>" not in end
        template = self._tokenizer.get_chat_template()
        return self._options.get("enable_thinking") is not False and any(
            mark in template for mark in _REASONING
        )

    def require_options(self, options: Mapping[str, Any], where: str) -> None:
        """Refuse variables that the template does not read: they would change nothing."""
        if not options:
            return
        if self._variables is None:
            from jinja2 import Environment, TemplateSyntaxError, meta

            environment = Environment(extensions=["jinja2.ext.loopcontrols"])
            try:
                tree = environment.parse(self._tokenizer.get_chat_template())
                self._variables = frozenset(meta.find_undeclared_variables(tree))
            except TemplateSyntaxError:  # with a tag that only transformers knows: not examined
                return
        unread = sorted(options.keys() - self._variables)
        if unread:
            known = ", ".join(sorted(self._variables - _GIVEN)) or "none"
            raise TemplateError(
                f"{where}: the chat template of {self._folder} does not read {unread[0]}; the "
                f"variables that it reads are {known}."
            )

    def prompt(
        self,
        turns: Sequence[Turn],
        answers: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the conversation, up to the start of the answer to the last turn.

        A turn that begins with an assistant's message continues from that message, and not from
        the target's own answer: tool results belong to the calls that they were made for.
        """
        return self._encode(self._render(turns, answers, tools, options))

    def plain(self, text: str) -> list[int]:
        """Token ids of a text without the template."""
        return list(self._tokenizer.encode(text))

    def user_prefix(self) -> list[int]:
        """Token ids of what the template puts before the text of a first user turn."""
        before, placeholder, _ = self._render([_PLACEHOLDER]).partition(_PLACEHOLDER)
        if not placeholder or not before:
            what = "puts nothing before" if placeholder else "changes"
            raise TemplateError(
                f"{self._folder}: the chat template {what} the user's text, so the target cannot "
                "write `self` prompts. Use a prompt file instead."
            )
        return self._encode(before)

    @property
    def user_ends(self) -> tuple[int, ...]:
        """Tokens at which a user's turn ends: that of the template, and the end of a text."""
        ends = (self._user_end[0], self.end_of_turn)
        return tuple(dict.fromkeys(each for each in ends if each is not None))

    def user_text(self, tokens: Sequence[int]) -> str:
        """The text of a user's turn that the target wrote, without what it wrote after its end."""
        end, mark = self._user_end
        if end in tokens:
            tokens = tokens[: tokens.index(end)]
        text = self.text(tokens)
        return (text.partition(mark)[0] if mark else text).strip()

    @cached_property
    def _user_end(self) -> tuple[int | None, str]:
        """What the template puts after a user's text: a token, or else the line that follows."""
        after = self._render([_PLACEHOLDER]).rpartition(_PLACEHOLDER)[2].strip()
        if not after:
            return None, ""
        first = self._encode(after)[0]
        if first in self._tokenizer.get_added_vocab().values():
            return first, ""
        return None, after.splitlines()[0]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def answer_text(self, tokens: Sequence[int]) -> str:
        """The text of an answer, as the next turn of a conversation should contain it."""
        if _FINAL in self._tokenizer.get_chat_template():
            # The reasoning is delimited by special tokens, which `text` leaves out.
            _, found, final = self._tokenizer.decode(tokens).rpartition(_FINAL)
            if found:
                return str(final).partition("<|")[0]
        return self.text(tokens)

    def _render(
        self,
        turns: Sequence[Turn],
        answers: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        messages: list[Message] = []
        for number, turn in enumerate(turns):
            added = messages_of(turn)
            if number and added[0]["role"] != "assistant":
                messages.append({"role": "assistant", "content": answers[number - 1]})
            messages += added
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages,
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **self._options | dict(options or {}),
            )
        except Exception as problem:  # a template is a program, and may refuse a conversation
            reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            raise TemplateError(
                f"{self._folder}: the chat template refuses this conversation: {reason}"
            ) from problem
        return rendered

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def load_tokenizer(folder: Path) -> Any:
    """Transformers' own, also where the folder has a file in Mistral's format as well.

    The one for that format has no chat template.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, mistral_format=False)


def messages_of(turn: Turn) -> tuple[Message, ...]:
    return ({"role": "user", "content": turn},) if isinstance(turn, str) else turn
