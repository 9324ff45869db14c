"""Whether speculation leaves the text as it is.

In float32 the texts must be equal. In a narrower type they need not: a step with drafts puts other
numbers of tokens through the same kernels than a step without, the last bit of a logit changes with
that, and where two tokens score alike the other one may win. Such a divergence is a near-tie, and
that is checked: the target's own logits there, computed by transformers over the text up to it,
must not be further apart for the two tokens than rounding explains.

What rounding explains: a logit of size s comes in steps of one ulp, `eps * 2^floor(log2 s)`. Two
tokens whose order is turned by rounding are each off by at most the noise and one step, so their
gap is at most twice that. The noise is measured where the texts part: how far any of the likely
tokens' logits moves when the same text is read in other portions. `ULPS` leaves room for kernels
that differ more than portions do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leadout.check.findings import Finding, Gravity
from leadout.check.result import Divergence, Lossless

ULPS = 2
# A logit that far below the best is no rival, however much it moves.
RIVALS = 16

ByPrompt = Mapping[str, Sequence[Sequence[int]]]  # by set, prompts or the answers to them


def compare_answers(
    model: nn.Module,
    prompts: ByPrompt,
    bare: ByPrompt,
    speculative: ByPrompt,
    precision: torch.dtype,
    portion: int,
) -> Lossless:
    """`model` is the target in transformers in the engine's precision.

    `portion` is how many tokens a step with drafts verifies at once.
    """
    texts = 0
    divergences: list[Divergence] = []
    allowed = 0.0
    for name, asked in prompts.items():
        for prompt, without, drafted in zip(asked, bare[name], speculative[name], strict=True):
            texts += 1
            place = first_divergence(without, drafted)
            if place is None:
                continue
            logits = _Logits(model, [*prompt, *without[:place]], portion)
            gap = logits.gap(without[place : place + 1], drafted[place : place + 1])
            divergences.append(Divergence(prompt_set=name, position=place, logit_gap=gap))
            if precision != torch.float32:
                allowed = max(allowed, logits.explained_by_rounding(precision))
    return Lossless(
        texts=texts,
        equal_texts=texts - len(divergences),
        divergences=divergences,
        largest_allowed_gap=allowed,
    )


def finding_of(lossless: Lossless) -> Finding | None:
    allowed = lossless.largest_allowed_gap
    bad = [each for each in lossless.divergences if allowed == 0 or each.logit_gap > allowed]
    if not bad:
        return None
    worst = max(bad, key=lambda each: each.logit_gap)
    return Finding(
        name="not-lossless",
        gravity=Gravity.UNFIT,
        message=(
            f"speculation changes {len(bad)} of {lossless.texts} greedy texts by more than "
            f"rounding: {worst.prompt_set} departs at token {worst.position} of the answer, where "
            f"the target's logits for the two tokens are {worst.logit_gap:.4g} apart, wanted "
            + (f"at most {allowed:.4g}" if allowed else "equal texts in float32")
        ),
        evidence={
            "texts": lossless.texts,
            "changed": len(bad),
            "largest_gap": worst.logit_gap,
            "allowed_gap": allowed,
        },
        remedy=(
            "Do not deploy: whatever the drafter is, the text must stay the target's own. Serve "
            "without speculation and report the engine's version with this result."
        ),
    )


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers part; the end of one counts, if the other goes on."""
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


class _Logits:
    """The target's scores for the token after a text, read at once and in two portions."""

    def __init__(self, model: nn.Module, tokens: Sequence[int], portion: int) -> None:
        text = torch.tensor([list(tokens)])
        start = max(text.shape[1] - portion, 1)
        self._at_once = _after(model, text)
        self._in_portions = self._at_once
        if start < text.shape[1]:
            self._in_portions = _after(model, text[:, start:], _read(model, text[:, :start]))

    def gap(self, one: Sequence[int], other: Sequence[int]) -> float:
        """Between two tokens; against the end of a text, as wide as the scores are."""
        if not (one and other):
            return float(self._at_once.max() - self._at_once.min())
        return float((self._at_once[one[0]] - self._at_once[other[0]]).abs())

    def explained_by_rounding(self, precision: torch.dtype) -> float:
        rivals = self._at_once.topk(min(RIVALS, len(self._at_once))).indices
        noise = (self._at_once - self._in_portions)[rivals].abs().max()
        return 2 * (ULPS * ulp(float(self._at_once[rivals].abs().max()), precision) + float(noise))


def ulp(value: float, precision: torch.dtype) -> float:
    """The step between neighbouring numbers of this size."""
    return torch.finfo(precision).eps * 2.0 ** math.floor(math.log2(value))


def _after(model: nn.Module, tokens: Tensor, past: Any = None) -> Tensor:
    with torch.no_grad():
        output = model(input_ids=tokens, past_key_values=past, logits_to_keep=1)
    scores: Tensor = output.logits[0, -1].float()
    return scores


def _read(model: nn.Module, tokens: Tensor) -> Any:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=True, logits_to_keep=1).past_key_values
