"""Tokenizer files that do not match the embedding, the drafter or its mask token are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from editing import edit_json, only, set_mask

from leadout.check.static import static_findings
from leadout.findings import Severity
from support.tiny_chat import END_OF_TEXT, END_OF_TURN, START_OF_TURN


def test_a_missing_chat_template_is_a_warning(target: Path, drafter: Path) -> None:
    (target / "chat_template.jinja").unlink()
    found = only(static_findings(target, drafter), "chat-template-missing")
    assert found.severity is Severity.WARNING


def test_a_template_in_the_tokenizer_settings_is_used(target: Path, drafter: Path) -> None:
    text = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").unlink()
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": text}]
    for stated in (text, named):
        edit_json(target / "tokenizer_config.json", lambda c, t=stated: c.update(chat_template=t))
        assert static_findings(target, drafter) == []


def test_a_missing_tokenizer_is_a_warning(target: Path, drafter: Path) -> None:
    (target / "tokenizer.json").unlink()
    found = only(static_findings(target, drafter), "tokenizer-missing")
    assert found.severity is Severity.WARNING
    (target / "tokenizer.model").write_bytes(b"")
    found = only(static_findings(target, drafter), "tokenizer-not-examined")
    assert found.severity is Severity.NOTE


def test_a_broken_tokenizer_is_an_error(target: Path, drafter: Path) -> None:
    (target / "tokenizer.json").write_text("{}")
    found = only(static_findings(target, drafter), "tokenizer-unreadable")
    assert found.severity is Severity.ERROR


@pytest.mark.parametrize(
    ("special", "severity"), [(False, Severity.WARNING), (True, Severity.NOTE)]
)
def test_tokens_beyond_the_embedding_are_reported(
    target: Path, drafter: Path, special: bool, severity: Severity
) -> None:
    def add(content: dict[str, Any]) -> None:
        last = dict(content["added_tokens"][-1])
        content["added_tokens"].append(last | {"id": 320, "content": "@@", "special": special})

    edit_json(target / "tokenizer.json", add)
    found = only(static_findings(target, drafter), "tokenizer-beyond-embedding")
    assert found.severity is severity
    assert "id 320" in found.message


def test_tokens_that_the_drafter_lacks_are_reported(target: Path, drafter: Path) -> None:
    edit_json(drafter / "config.json", lambda c: c.update(vocab_size=318))
    set_mask(drafter, 300)
    found = only(static_findings(target, drafter), "tokens-never-drafted")
    assert found.evidence == {"tokens": 2, "drafter_rows": 318}


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (65, "a token of ordinary text"),
        (END_OF_TURN, "the target's end-of-text token"),
        (END_OF_TEXT, "the target's end-of-text token"),  # it pads too
        (START_OF_TURN, "a token that the chat template writes"),
    ],
)
def test_a_mask_token_that_occurs_in_text_is_a_warning(
    target: Path, drafter: Path, token: int, why: str
) -> None:
    set_mask(drafter, token)
    (found,) = static_findings(target, drafter)
    assert (found.name, found.severity) == ("mask-in-text", Severity.WARNING)
    assert why in found.message


def test_a_mask_token_used_for_padding_only_is_a_note(target: Path, drafter: Path) -> None:
    set_mask(drafter, 300)
    edit_json(target / "config.json", lambda c: c.update(pad_token_id=300))
    assert only(static_findings(target, drafter), "mask-in-text").severity is Severity.NOTE
