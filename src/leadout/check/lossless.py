"""Whether speculation leaves the text as it is.

In float32 the texts must be equal. In a narrower type they need not: a step with drafts puts other
numbers of tokens through the same kernels than a step without, the last bit of a logit changes with
that, and where two tokens score alike the other one may win. Such a divergence is a near-tie, and
that is checked: the target's own logits there, computed by transformers over the text up to it,
must not be further apart for the two tokens than rounding explains.

What rounding explains: a logit of size s comes in steps of one ulp, `eps * 2^floor(log2 s)`, and
what comes before the head is rounded as well. `ULPS` is meant for two ways of computing that are
each a step or two from the exact logit. To it is added what is measured on the spot: how far the
gap of the two tokens moves when transformers reads the same text in portions as a verifying step
does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leadout.check.result import Divergence, Finding, Gravity, Lossless

ULPS = 4

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
            tokens = without[place : place + 1], drafted[place : place + 1]
            text = [*prompt, *without[:place]]
            tie = _Tie(_after_text(model, text), *tokens)
            divergences.append(Divergence(prompt_set=name, position=place, logit_gap=tie.gap))
            if precision != torch.float32:
                again = _Tie(_after_text(model, text, portion), *tokens)
                moved = abs(again.gap - tie.gap)
                allowed = max(allowed, ULPS * ulp(tie.size, precision) + moved)
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


class _Tie:
    """Two tokens, by the scores [vocab] for the place where one was chosen here, one there.

    One of them may be missing, where a text has ended: then the gap is as wide as the scores are.
    """

    def __init__(self, scores: Tensor, one: Sequence[int], other: Sequence[int]) -> None:
        of_both = scores[[*one, *other]] if one and other else scores
        self.gap = float(of_both.max() - of_both.min())
        # Scores near zero are sums of larger numbers, whose rounding they keep.
        self.size = max(float(of_both.abs().max()), float(scores.std()))


def ulp(value: float, precision: torch.dtype) -> float:
    """The step between neighbouring numbers of this size."""
    return torch.finfo(precision).eps * 2.0 ** math.floor(math.log2(value))


def _after_text(model: nn.Module, tokens: Sequence[int], last_portion: int = 0) -> Tensor:
    """Scores for the token after a text, [vocab], that is read at once or in two portions."""
    text = torch.tensor([list(tokens)])
    before, rest = text[:, :-last_portion], text[:, -last_portion:]
    past: Any = None
    with torch.no_grad():
        if 0 < before.shape[1] < text.shape[1]:
            past = model(input_ids=before, use_cache=True, logits_to_keep=1).past_key_values
        output = model(
            input_ids=text if past is None else rest, past_key_values=past, logits_to_keep=1
        )
    scores: Tensor = output.logits[0, -1].float()
    return scores
