"""Other ways to ask: without the chat template, or in the other thinking mode.

A drafter knows the text it was trained on. If it accepts clearly more when the target is asked in
another way, it was trained for that way, and the pair is served in the wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from leadout.check.acceptance import tabulate
from leadout.check.findings import Finding, Gravity
from leadout.check.offline import as_served, served_weights
from leadout.check.probe import Probe, Text, drafter_of
from leadout.check.prompts import default_or_given
from leadout.check.result import OfflineAcceptance
from leadout.checkpoints import Checkpoint
from leadout.data.chat import Chat, TemplateError

PLAIN = "without the chat template"
THINKING = {True: "with thinking", False: "without thinking"}
PROMPTS = 9  # of each mode, over all sets


def other_modes(
    sources: Sequence[str], target: Path, chat: Chat, max_prompt: int
) -> dict[str, list[list[int]]]:
    """A few of the prompts in every way of asking that gives other tokens than `chat` does."""
    prompts = default_or_given(sources)
    some = prompts[:: max(1, len(prompts) // PROMPTS)][:PROMPTS]
    asked = [chat.prompt(prompt.turns[:1]) for prompt in some]
    modes = {PLAIN: [chat.plain(prompt.turns[0]) for prompt in some]}
    for thinking, name in THINKING.items():
        try:
            other = Chat(target, thinking)
        except TemplateError:
            break  # the template knows no modes
        modes[name] = [other.prompt(prompt.turns[:1]) for prompt in some]
    return {
        name: [prompt for prompt in tokens if len(prompt) <= max_prompt]
        for name, tokens in modes.items()
        if tokens != asked
    }


def mode_findings(
    target: Path,
    model: nn.Module,
    checkpoint: Checkpoint,
    draft_tokens: int,
    answers: Mapping[str, Sequence[Text]],
    offline: OfflineAcceptance,
    precision: torch.dtype,
) -> list[Finding]:
    """One finding for each mode in which the drafter accepts clearly more."""
    config = as_served(checkpoint.config, draft_tokens)
    drafter = drafter_of(config, served_weights(checkpoint, precision))
    now = offline.overall.length
    findings = []
    for mode, texts in answers.items():
        long_enough = [text for text in texts if len(text.answer) > draft_tokens]
        if not long_enough:
            continue
        probe = Probe(target, model, long_enough, config.target_layer_ids, precision)
        length = tabulate(probe.acceptance(drafter), draft_tokens).length
        if length.low > now.high:
            findings.append(
                Finding(
                    name="asked-in-another-mode",
                    gravity=Gravity.DOUBTFUL,
                    message=(
                        f"the drafter accepts {length} {mode}, but {now} as it is asked now: it "
                        "was trained on text of that kind"
                    ),
                    evidence={"mode": mode, "there": length.value, "here": now.value},
                    remedy=f"Serve the target {mode}, or train the drafter as it is served.",
                )
            )
    return findings
