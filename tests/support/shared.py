"""Prompt sets and a weak drafter that stand beside the checkout; the product needs neither."""

from __future__ import annotations

import json
from typing import Any

from support.models import ROOT

SHARED = ROOT.parent / "shared"
QUICK_DRAFTER = SHARED / "models" / "smollm2-quick-drafter"


def first_turns(prompt_set: str, count: int) -> list[str]:
    """The first user turn of the first prompts of a set."""
    with (SHARED / "data" / "prompts" / f"{prompt_set}.jsonl").open() as lines:
        return [json.loads(line)["turns"][0] for line, _ in zip(lines, range(count), strict=False)]


def chat_tokens(tokenizer: Any, turn: str) -> list[int]:
    """A user turn as token ids in the target's chat template, ready for the answer."""
    messages = [{"role": "user", "content": turn}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return list(encoded["input_ids"])
