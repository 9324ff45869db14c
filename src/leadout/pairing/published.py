"""Published DFlash drafters by target, for `--draft auto`, as of the date below.

The table lists plain DFlash drafters only, in the two formats that Leadout reads, and only where
the target is certain. Successors such as DFlash 2, and drafters with attention sinks, gates or
quantized weights, are not included.
"""

from __future__ import annotations

from dataclasses import dataclass

from leadout.checkpoints import Format
from leadout.models import hub_name, last_part

AS_OF = "2026-11"


@dataclass(frozen=True, slots=True)
class PublishedDrafter:
    """A drafter on the Hugging Face hub and the target it was trained for."""

    target: str
    drafter: str
    format: Format


# If a target has several, the first is used.
PUBLISHED = (
    PublishedDrafter("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", "zlab"),
    PublishedDrafter("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", "zlab"),
    PublishedDrafter("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.dflash", "speculators"),
    PublishedDrafter(
        "Qwen/Qwen3-30B-A3B", "RedHatAI/Qwen3-30B-A3B-speculator.dflash", "speculators"
    ),
    PublishedDrafter(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash", "zlab"
    ),
    PublishedDrafter("Qwen/Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash", "zlab"),
    PublishedDrafter("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash", "zlab"),
    PublishedDrafter("Qwen/Qwen3.5-122B-A10B", "z-lab/Qwen3.5-122B-A10B-DFlash", "zlab"),
    PublishedDrafter("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash", "zlab"),
    PublishedDrafter("Qwen/Qwen3.6-35B-A3B", "z-lab/Qwen3.6-35B-A3B-DFlash", "zlab"),
    PublishedDrafter(
        "meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", "zlab"
    ),
    PublishedDrafter("openai/gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash", "zlab"),
    PublishedDrafter("moonshotai/Kimi-K2.5", "z-lab/Kimi-K2.5-DFlash", "zlab"),
    PublishedDrafter("google/gemma-4-31B-it", "z-lab/gemma-4-31B-it-DFlash", "zlab"),
)


def find_published(target: str) -> PublishedDrafter | None:
    """The drafter for a hub name, or for a local folder with the name of the model.

    The whole name must match, ignoring case: base models, quantizations and copies of other owners
    are different models.
    """
    named = hub_name(target)
    for row in PUBLISHED:
        if named is None:
            same = last_part(target).casefold() == last_part(row.target).casefold()
        else:
            same = named.casefold() == row.target.casefold()
        if same:
            return row
    return None
